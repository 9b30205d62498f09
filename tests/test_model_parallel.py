import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshrec import DataType, EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from meshrec import distributed as md
from meshrec.comms.mesh import ShardingEnv, default_env
from meshrec.distributed import sharders
from meshrec.model_parallel import DistributedModelParallel, get_unwrapped_module
from meshrec.optim import SGD, RowWiseAdagrad, apply_optimizer_in_backward
from meshrec.planner import EmbeddingShardingPlanner
from meshrec.quant import quantize
from meshrec.testing import RankError, RankPool, assert_equal_to_unsharded

NAMES = ["ebc.embedding_bags.t0.weight", "ebc.embedding_bags.t1.weight", "over.weight", "over.bias"]


class Model(nn.Module):
    def __init__(self, device=None):
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name="t0", num_embeddings=10, embedding_dim=4, feature_names=["a"]),
                EmbeddingBagConfig(name="t1", num_embeddings=9, embedding_dim=4, feature_names=["b"]),
            ],
            device=device,
        )
        self.over = nn.Linear(8, 1, device=device)

    def forward(self, features):
        return self.over(self.ebc(features).values())


def make_plan(t0=None, t1=None):
    builders = {"t0": t0 or md.row_wise(), "t1": t1 or md.data_parallel()}
    world_size = default_env().shard.size
    return md.ShardingPlan(
        {"ebc": md.construct_module_sharding_plan(Model("meta").ebc, builders, world_size=world_size)}
    )


def features():
    return KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([1, 1, 2, 0]))


def make(dense="ddp", device=None, sharder=None, **options):
    sharders = [sharder or md.EmbeddingBagCollectionSharder(SGD(lr=0.1))]
    return DistributedModelParallel(
        Model(device), plan=make_plan(), sharders=sharders, dense=dense, **options
    )


def names(dense):
    model = make(dense)
    model(features()).sum().backward()
    assert sorted(name for name, _ in model.named_parameters()) == sorted(NAMES)
    assert sorted(model.state_dict()) == sorted(NAMES)
    assert list(model.fused_optimizer.params) == NAMES[:2]
    assert isinstance(get_unwrapped_module(model), Model)
    assert model.sparse_grad_parameter_names() == []
    assert list(model.named_buffers()) == []
    model.load_state_dict(model.state_dict())
    return type(model._dmp_wrapped_module).__name__


@pytest.mark.parametrize(
    ("dense", "kind"), [("ddp", "DistributedDataParallel"), ("fsdp2", "FSDPModel"), (None, "Model")]
)
def test_names_survive(ranks, dense, kind):
    assert kind in ranks(2).run(names, dense)[0] or dense == "fsdp2"


def from_meta():
    model = make(device="meta")
    assert not any(parameter.is_meta for parameter in model.parameters())
    return [
        p.tolist() for name, p in model.named_parameters() if not name.startswith("ebc.embedding_bags.t0")
    ]


def test_dense_parameters_and_replicas_from_meta_start_equal(ranks):
    first, second = ranks(2).run(from_meta)
    assert first == second


def replicas_differ_at_first():
    torch.manual_seed(default_env().world.rank)
    model = make(dense=None)
    return dict(model.named_parameters())[NAMES[1]].tolist(), dict(model.named_parameters())[
        NAMES[2]
    ].tolist()


def test_replicas_of_built_models_start_equal(ranks):
    first, second = ranks(2).run(replicas_differ_at_first)
    assert first == second


def attached():
    """Each table keeps the optimizer it was given, data-parallel ones too; nothing is invented."""
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, [model.ebc.embedding_bags["t1"].weight], {"lr": 0.5})
    sharded = DistributedModelParallel(
        model, plan=make_plan(), sharders=[md.EmbeddingBagCollectionSharder()], dense=None
    )
    sharded(features()).sum().backward()
    return list(sharded.fused_optimizer.params), [
        name for name, parameter in sharded.named_parameters() if parameter.grad is not None
    ]


def test_optimizers_are_neither_dropped_nor_invented(ranks):
    for fused, with_gradients in ranks(2).run(attached):
        assert fused == [NAMES[1]]
        assert with_gradients == [NAMES[0], NAMES[2], NAMES[3]]


def learning_rate():
    model = make(dense=None, sharder=md.EmbeddingBagCollectionSharder(RowWiseAdagrad(lr=0.1)))
    optimizer = model.fused_optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.0)
    model(features()).sum().backward()
    optimizer.step()
    scheduler.step()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model(features()).sum().backward()
    return all(torch.equal(before[name], p) for name, p in model.named_parameters() if name in NAMES[:2])


def test_schedulers_reach_the_fused_optimizer(ranks):
    assert ranks(2).run(learning_rate) == [True, True]


class Shifted(nn.Module):
    constant_buffers = ("fixed",)

    def __init__(self):
        super().__init__()
        rank = float(dist.get_rank())
        self.over = nn.Linear(1, 1)
        self.register_buffer("fixed", torch.tensor([rank]))
        self.register_buffer("moving", torch.tensor([rank]))

    def forward(self, values):
        return self.over(values + self.fixed + self.moving)


def buffers_after_a_step():
    inner = Shifted()
    model = DistributedModelParallel(nn.Sequential(nn.Identity(), inner))
    inner.moving += dist.get_rank()
    model(torch.ones(2, 1)).sum().backward()
    return inner.fixed.item(), inner.moving.item()


def test_buffers_are_broadcast_unless_their_module_says_that_they_are_constant(ranks):
    assert ranks(2).run(buffers_after_a_step) == [(0.0, 0.0), (1.0, 0.0)]


def hook_called():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = make(dense_options={"bucket_cap_mb": 1, "gradient_as_bucket_view": True, "static_graph": True})
    model.register_comm_hook(None, fp16_compress_hook)
    for _ in range(3):  # a static graph is another one from the second step on
        model(features()).sum().backward()
    wrapped = model._dmp_wrapped_module
    gradient = dict(model.named_parameters())["over.weight"].grad
    return wrapped.gradient_as_bucket_view, wrapped.static_graph, bool(gradient.isfinite().all())


def test_ddps_knobs_are_reachable(ranks):
    assert ranks(2).run(hook_called) == [(True, True, True)] * 2


def gradients_of_a_graph(static_graph):
    torch.manual_seed(0)
    model = make(dense_options={"static_graph": static_graph})
    for _ in range(3):  # a static graph is another one from the second step on
        model.zero_grad()
        model(features()).sum().backward()
    state = model.dense_gradient_averager
    return state.ends_with_backward, dict(model.named_parameters())["over.weight"].grad.tolist()


def test_only_without_a_static_graph_averaging_ends_with_the_backward_pass(ranks):
    pool = ranks(2)
    (ends, gradient), _ = pool.run(gradients_of_a_graph, False)
    (static_ends, expected), _ = pool.run(gradients_of_a_graph, True)
    assert (ends, static_ends) == (True, False)
    assert gradient == expected


def test_bf16_gradients_need_ddp_and_no_other_hook(ranks):
    with pytest.raises(ValueError, match="dense='fsdp2'"):
        DistributedModelParallel(Model(), dense="fsdp2", dense_gradients="bf16")
    with pytest.raises(ValueError, match="'fp16'"):
        DistributedModelParallel(Model(), dense_gradients="fp16")
    with pytest.raises(RankError, match="dense_gradients is 'bf16'"):
        ranks(2).run(register_beside_bf16)


def register_beside_bf16():
    model = make(dense_gradients="bf16")
    model.register_comm_hook(None, lambda state, bucket: None)


def which_hooks():
    def nothing(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    names = []
    for register in ("never", "through the model", "with DDP"):
        model = make()
        wrapped = model._dmp_wrapped_module
        if register != "never":
            (model if register == "through the model" else wrapped).register_comm_hook(None, nothing)
        with torch.no_grad():
            model(features())
        model(features()).sum().backward()
        names.append([hook.__name__ for hook, _ in wrapped._comm_hooks])
    return names


def test_a_users_hook_wins(ranks):
    own, *others = ranks(2).run(which_hooks)[0]
    assert own in (["average_gradients"], [])  # nothing where ranks have no link
    assert others == [["nothing"], ["nothing"]]


def hsdp(sizes, names):
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    env = md.ShardingEnv.from_mesh(mesh)
    model = Model()
    plan = md.construct_module_sharding_plan(
        model.ebc, {"t0": md.row_wise(), "t1": md.data_parallel()}, world_size=env.shard.size
    )
    model = DistributedModelParallel(
        model,
        env,
        plan=md.ShardingPlan({"ebc": plan}),
        sharders=[md.EmbeddingBagCollectionSharder(SGD(lr=0.1))],
        dense="fsdp2",
    )
    model(features()).sum().backward()
    weight = dict(model.named_parameters())["over.weight"]
    return weight.device_mesh.mesh.tolist(), [type(placement).__name__ for placement in weight.placements]


@pytest.mark.parametrize(
    ("sizes", "names", "mesh"),
    [
        ((2, 1, 2), ("replicate", "node", "local"), [[0, 1], [2, 3]]),
        ((2, 2, 1), ("replicate", "node", "local"), [[0, 1], [2, 3]]),
        ((2, 2), ("replicate", "shard"), [[0, 1], [2, 3]]),
        ((2, 2), ("node", "local"), [0, 1, 2, 3]),
    ],
    ids=str,
)
def test_fsdp2_replicates_over_replicas_and_shards_over_the_rest(ranks, sizes, names, mesh):
    placements = ["Replicate", "Shard"] if "replicate" in names else ["Shard"]
    for found in ranks(4).run(hsdp, sizes, names):
        assert found == (mesh, placements)


ON_FOUR_SHARDS = {
    "rows and copies": {"t0": md.row_wise(), "t1": md.data_parallel()},
    "rows of a node, and columns": {"t0": md.table_row_wise(node=1), "t1": md.column_wise(ranks=[0, 3])},
}


def hsdp_on_three_axes(kind):
    env = md.ShardingEnv.from_mesh(
        init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "node", "local"))
    )
    torch.manual_seed(0)
    plan = md.construct_module_sharding_plan(
        Model("meta").ebc, ON_FOUR_SHARDS[kind], world_size=4, local_size=2
    )
    batches = [[(random_features(),) for _ in range(8)] for _ in range(4)]

    def make_model():
        torch.manual_seed(1)
        return Model()

    assert_equal_to_unsharded(
        make_model,
        md.ShardingPlan({"ebc": plan}),
        batches,
        loss=lambda scores: scores.square().mean(),
        sharders=[md.EmbeddingBagCollectionSharder(RowWiseAdagrad(lr=0.1))],
        env=env,
        dense="fsdp2",
    )


def random_features():
    """Three samples, some of them empty."""
    lengths = torch.randint(0, 3, (6,))
    return KeyedJaggedTensor(["a", "b"], torch.randint(0, 9, (int(lengths.sum()),)), lengths=lengths)


def test_hsdp_on_eight_ranks_learns_what_the_unsharded_model_does():
    with RankPool(8) as pool:
        for kind in ON_FOUR_SHARDS:
            pool.run(hsdp_on_three_axes, kind)


def hook_without_ddp():
    make(dense=None).register_comm_hook(None, None)


def different_plans():
    rank = default_env().world.rank
    plan = make_plan(t0=md.table_wise(rank=rank))
    DistributedModelParallel(Model("meta"), plan=plan)


def no_such_module():
    plan = md.ShardingPlan({"other": make_plan().plan["ebc"]})
    DistributedModelParallel(Model("meta"), plan=plan)


def overlap():
    plan = make_plan()
    twice = plan.plan["ebc"]["t0"].shards
    plan.plan["ebc"]["t0"] = md.ParameterSharding(
        sharding_type=md.ShardingType.ROW_WISE,
        sharding_spec=md.EnumerableShardingSpec(shards=twice + twice[:1]),
    )
    DistributedModelParallel(Model("meta"), plan=plan)


def missing_table():
    plan = make_plan()
    del plan.plan["ebc"]["t1"]
    DistributedModelParallel(Model("meta"), plan=plan)


def uncovered():
    plan = make_plan()
    first, _ = plan.plan["ebc"]["t0"].shards
    plan.plan["ebc"]["t0"] = md.ParameterSharding(
        sharding_type=md.ShardingType.ROW_WISE, sharding_spec=md.EnumerableShardingSpec(shards=(first,))
    )
    DistributedModelParallel(Model("meta"), plan=plan)


def no_such_rank():
    plan = make_plan(t0=md.table_wise(rank=0))
    shard = plan.plan["ebc"]["t0"].shards[0]
    elsewhere = dataclasses.replace(shard, placement=md.RemoteDevice(rank=7, device="cpu"))
    plan.plan["ebc"]["t0"] = md.ParameterSharding(
        sharding_type=md.ShardingType.TABLE_WISE, sharding_spec=md.EnumerableShardingSpec(shards=(elsewhere,))
    )
    DistributedModelParallel(Model("meta"), plan=plan)


def input_elsewhere():
    make()(features().to(torch.device("meta")))


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (hook_without_ddp, "'ddp'.*dense=None"),
        (
            different_plans,
            "'t0'.*'ebc'.*ranks 0.*1 place",
        ),
        (no_such_module, "'ebc'"),
        (overlap, r"'t0'.*\[0:5, 0:4\].*0.*\[0:5, 0:4\].*0 overlap"),
        (missing_table, r"'t1'.*\['t0'\]"),
        (uncovered, r"'t0'.*\[0:5, 0:4\].*0 cover 20.*40 elements.*10 x 4"),
        (no_such_rank, r"'t0'.*\[0:10, 0:4\].*7.*rank 7.*\[0.*2"),
        (input_elsewhere, "'t0'"),
    ],
)
def test_failures_are_the_same_on_all_ranks(ranks, function, match):
    with pytest.raises(RankError, match=match) as failure:
        ranks(2).run(function)
    assert "rank 0" in str(failure.value)
    assert "rank 1" in str(failure.value)


def test_dense_must_be_known():
    with pytest.raises(ValueError, match=r"'ddp'.*'fsdp2'.*'zero'"):
        DistributedModelParallel(Model(), plan=make_plan(), dense="zero")


def only_cuda():
    env = default_env()
    return [str(sharders._env_and_device(env, torch.device(kind))[1]) for kind in ("cpu", "cuda")]


def test_gloo_groups_take_cuda_devices_too(ranks, monkeypatch):
    assert ranks(2).run(only_cuda) == [["cpu", "cuda"]] * 2
    monkeypatch.setattr(sharders, "group_device", lambda group: torch.device("cuda"))
    env = SimpleNamespace(devices=(), world=SimpleNamespace(group=object()))
    with pytest.raises(ValueError, match="process"):
        sharders._env_and_device(env, torch.device("cpu"))


def without_tables():
    torch.manual_seed(dist.get_rank())
    model = DistributedModelParallel(nn.Linear(3, 2))
    model(torch.full((4, 3), 1.0 + dist.get_rank())).sum().backward()
    return model.module.weight.grad.tolist(), model.module.weight.tolist(), model.plan.plan


def test_a_model_without_tables_is_data_parallel(ranks):
    first, second = ranks(2).run(without_tables)
    assert first == second
    assert first[0] == [[6.0] * 3] * 2
    assert first[2] == {}
    assert list(DistributedModelParallel(nn.Linear(2, 1)).fused_optimizer.param_groups) == []


def trained(**options):
    torch.manual_seed(0)
    sharders = [md.EmbeddingBagCollectionSharder(RowWiseAdagrad(lr=0.1))]
    model = DistributedModelParallel(Model(), sharders=sharders, **options)
    for _ in range(3):
        model(features()).square().mean().backward()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def on_replicas_alone():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
    env = ShardingEnv.from_mesh(mesh)
    with pytest.raises(ValueError, match=r"'fsdp2'.*'shard'"):
        trained(env=env, dense="fsdp2")
    return trained(env=env)


def test_replicas_need_no_other_axis(ranks):
    for found in ranks(2).run(on_replicas_alone):
        torch.testing.assert_close(found, trained())


def test_a_plan_says_what_runs():
    given = make_plan()
    assert {p.compute_kernel.value for _, _, p in given.tables()} == {"fused"}
    plain = DistributedModelParallel(Model(), plan=given)
    assert {p.compute_kernel.value for _, _, p in plain.plan.tables()} == {"dense"}
    assert "dense" in str(plain.plan)
    fused = DistributedModelParallel(
        Model(), plan=given, sharders=[md.EmbeddingBagCollectionSharder(SGD(lr=0.1))]
    )
    assert {p.compute_kernel.value for _, _, p in fused.plan.tables()} == {"fused"}
    quantised = quantize(plain, DataType.INT8)
    assert {p.compute_kernel.value for _, _, p in quantised.plan.tables()} == {"quant"}
    planned = EmbeddingShardingPlanner().plan(quantize(Model(), DataType.INT8))
    assert {p.compute_kernel.value for _, _, p in planned.tables()} == {"quant"}


def test_one_process():
    model = make()
    before = model(features()).detach()
    model(features()).sum().backward()
    assert not torch.equal(model(features()), before)


def test_parameters_on_meta_need_a_way_to_start():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2, device="meta"))

    with pytest.raises(ValueError, match="reset_parameters"):
        DistributedModelParallel(Odd(), plan=md.ShardingPlan({}))


def planned():
    model = DistributedModelParallel(Model("meta"), sharders=[md.EmbeddingBagCollectionSharder(SGD(lr=0.1))])
    model(features()).sum().backward()
    return model.plan.digest()


def test_without_a_plan_the_planner_makes_one(ranks):
    first, second = ranks(2).run(planned)
    assert first == second
