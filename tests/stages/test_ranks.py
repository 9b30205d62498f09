import copy
import os
import random
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh

import meshrec
from meshrec.checkpoint import load, save
from meshrec.data import Batch
from meshrec.distributed import EmbeddingBagCollectionSharder, ShardingPlan, construct_module_sharding_plan
from meshrec.models.dlrm import DLRM, DLRMTrain
from meshrec.optim import Adam
from meshrec.stages import Staged, StagedOverRanks, StageError, split_seed

NUM_ROWS, WIDTH, STEPS = 40, 8, 4


def dlrm():
    torch.manual_seed(0)
    tables = [
        meshrec.EmbeddingBagConfig(
            name=f"t{i}", embedding_dim=WIDTH, num_embeddings=NUM_ROWS, feature_names=[f"f{i}"]
        )
        for i in range(3)
    ]
    return DLRMTrain(DLRM(meshrec.EmbeddingBagCollection(tables), 4, [16, WIDTH], [16, 8, 1]))


def clicks(batch, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (3 * batch,), generator=generator)
    ids = torch.randint(0, NUM_ROWS, (int(lengths.sum()),), generator=generator)
    sparse = meshrec.KeyedJaggedTensor.from_lengths_sync(["f0", "f1", "f2"], ids, lengths)
    dense = torch.randn(batch, 4, generator=generator)
    return Batch(dense, sparse, torch.randint(0, 2, (batch,), generator=generator).float())


def mesh_of(names, sizes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def sharded_plan(names, sizes):
    """The tables' plan for the ranks of a stage."""
    ranks = dict(zip(names, sizes, strict=True)).get("shard", 1)
    kinds = [meshrec.distributed.row_wise(), meshrec.distributed.table_wise(rank=ranks - 1)]
    kinds.append(meshrec.distributed.column_wise(ranks=list(range(ranks))))
    ebc = dlrm().model.sparse_arch.embedding_bag_collection
    module = construct_module_sharding_plan(
        ebc, {f"t{i}": kind for i, kind in enumerate(kinds)}, world_size=ranks, local_size=ranks
    )
    return ShardingPlan({"model.sparse_arch.embedding_bag_collection": module})


def train_staged(names, sizes, cuts, dense):
    mesh = mesh_of(names, sizes)
    staged = StagedOverRanks(
        dlrm(),
        mesh=mesh,
        cuts=cuts,
        split_size=5,
        plan=sharded_plan(names, sizes) if "shard" in names else None,
        sharders=[EmbeddingBagCollectionSharder(Adam(lr=0.01))],
        dense=dense,
    )
    optimizer = torch.optim.Adam(staged.dense_param_groups(), lr=0.01)
    lane = lane_of(mesh)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(staged.step(clicks(12, 100 * step + lane)).loss))
        optimizer.step()
    state = {
        name: value.full_tensor()
        if hasattr(value, "full_tensor") and dense == "fsdp2" and "embedding" not in name
        else value
        for name, value in staged.state_dict().items()
        if "embedding_bags" not in name
    }
    return lane, losses, {name: value.detach().clone() for name, value in state.items()}


def lane_of(mesh):
    """A number for each lane, the same in all its stages."""
    lane = 0
    for name, size in zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True):
        if name != "stage":
            lane = lane * size + mesh.get_local_rank(name)
    return lane


def train_plain(lanes):
    model = dlrm()
    meshrec.fuse(model, optimizer=Adam(lr=0.01))
    tables = {id(p) for p in model.model.sparse_arch.parameters()}
    optimizer = torch.optim.Adam([p for p in model.parameters() if id(p) not in tables], lr=0.01)
    losses = []
    for step in range(STEPS):
        batches = [clicks(12, 100 * step + lane) for lane in range(lanes)]
        each = [model(batch)[0] for batch in batches]
        losses.append([float(loss.detach()) for loss in each])
        optimizer.zero_grad()
        (sum(each) / lanes).backward() if lanes == 1 else joint(model, batches).backward()
        optimizer.step()
    return losses, model.state_dict()


def joint(model, batches):
    """All lanes' batches as one: tables that update themselves see one backward pass."""
    sparse = [batch.sparse for batch in batches]
    jagged = {
        key: [kjt[key] for kjt in sparse]
        for key in sparse[0].keys()  # noqa: SIM118 - not a dict
    }
    one = meshrec.KeyedJaggedTensor.from_lengths_sync(
        list(jagged),
        torch.cat([j.values() for parts in jagged.values() for j in parts]),
        torch.cat([j.lengths() for parts in jagged.values() for j in parts]),
    )
    whole = Batch(torch.cat([b.dense for b in batches]), one, torch.cat([b.labels for b in batches]))
    return model(whole)[0]


@pytest.mark.parametrize(
    ("names", "sizes", "cuts", "dense"),
    [
        (("stage",), (2,), ["model.over_arch"], "ddp"),
        (
            ("stage",),
            (4,),
            ["model.dense_arch.model._mlp.1", "model.inter_arch", "model.over_arch.model.1"],
            "ddp",
        ),
        (("replicate", "stage"), (2, 2), ["model.over_arch"], "ddp"),
        (("stage", "shard"), (2, 2), ["model.over_arch"], "fsdp2"),
        (("replicate", "shard", "stage"), (2, 2, 2), ["model.over_arch"], "fsdp2"),
        (("replicate", "shard", "stage"), (2, 2, 2), ["model.inter_arch"], "ddp"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_every_layout_trains_to_the_numbers_of_one_process(ranks, names, sizes, cuts, dense):
    found = ranks(torch.Size(sizes).numel()).run(train_staged, names, sizes, cuts, dense)
    losses, state = train_plain(torch.Size(sizes).numel() // sizes[names.index("stage")])
    seen = set()
    for lane, own_losses, own_state in found:
        torch.testing.assert_close(own_losses, [each[lane] for each in losses], rtol=1e-5, atol=1e-6)
        seen |= own_state.keys()
        for name, value in own_state.items():
            torch.testing.assert_close(
                value, state[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert seen == {name for name in state if "embedding_bags" not in name}


class Sometimes(nn.Module):
    """Raises where the batch says so, and is slow now and then."""

    def __init__(self, seed):
        super().__init__()
        self.delays = random.Random(seed)

    def forward(self, x):
        time.sleep(self.delays.random() * 0.004)
        if (x.detach().abs() > 1e6).any():
            raise ValueError("too large")
        return x


def chain(seed=0):
    torch.manual_seed(0)
    parts = []
    for index in range(4):
        parts += [nn.Linear(6, 6), Sometimes(100 * seed + index), nn.Dropout(0.25)]
    return nn.Sequential(*parts)


def mean_square(out, target):
    return (out - target).square().mean()


def staged_chain(names, sizes, seed=0):
    return StagedOverRanks(
        chain(seed),
        mesh=mesh_of(names, sizes),
        cuts=["3", "6", "9"][: sizes[names.index("stage")] - 1],
        split_size=3,
        criterion=mean_square,
    )


def fail_once(where):
    staged = staged_chain(("replicate", "stage"), (2, 2), seed=dist.get_rank())
    lane = dist.get_rank() // 2
    torch.manual_seed(lane)
    x, y = torch.randn(2, 11, 6)
    bad = x.clone()
    if lane == 0:
        bad[where] = 1e9
    messages = []
    for values in (bad, x):
        staged.zero_grad()
        try:
            staged.step(values, target=y)
        except StageError as error:
            messages.append(str(error))
    return messages, [p.grad.clone() for p in staged.parameters()]


@pytest.mark.parametrize(("where", "split"), [(0, 0), (10, 3)])
def test_an_error_reaches_every_rank_and_the_next_step_works(ranks, where, split):
    found = ranks(4).run(fail_once, where)
    for messages, gradients in found:
        assert len(messages) == 1
        assert f"forward of split {split} of 4: ValueError: too large" in messages[0]
        assert all(gradient.isfinite().all() for gradient in gradients)
    assert len({messages[0] for messages, _ in found}) == 1


def run_with_delays(repeats):
    losses = []
    staged = staged_chain(("replicate", "stage"), (2, 4))
    (slow,) = (module for module in staged.modules() if isinstance(module, Sometimes))
    lane = dist.get_rank() // 4
    for seed in range(repeats):
        slow.delays.seed(8 * seed + dist.get_rank())
        torch.manual_seed(lane)
        x, y = torch.randn(2, 11, 6)
        torch.manual_seed(5)
        losses.append(float(staged.step(x, target=y).loss))
    return losses


def test_delays_change_nothing_on_eight_ranks(ranks):
    found = ranks(8).run(run_with_delays, 50 if "MESHREC_THOROUGH" in os.environ else 15)
    for lane in (found[:4], found[4:]):
        assert all(losses == lane[0] for losses in lane)
        assert len(set(lane[0])) == 1
        assert lane[0][0] > 0


def dropout_loss():
    staged = staged_chain(("stage",), (2,))
    torch.manual_seed(3)
    x, y = torch.randn(2, 8, 6)
    torch.manual_seed(9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = staged.step(x, target=y)
    return float(result.loss), None if result.output is None else result.output


def test_random_numbers_are_those_of_each_split_alone(ranks):
    found = ranks(2).run(dropout_loss)
    torch.manual_seed(3)
    x, y = torch.randn(2, 8, 6)
    torch.manual_seed(9)
    seed = int(torch.empty((), dtype=torch.int64).random_())
    model, outs = chain(), []
    for k, part in enumerate(x.split(3)):
        torch.manual_seed(split_seed(seed, k))
        outs.append(model(part))
    assert torch.equal(found[1][1], torch.cat(outs).detach())
    assert found[0][0] == found[1][0] == pytest.approx(float(mean_square(torch.cat(outs), y).detach()))


def refusals():
    mesh, messages = mesh_of(("stage",), (2,)), []
    cases = [
        {"mesh": mesh_of(("shard",), (2,)), "cuts": ["3"], "split_size": 2},
        {"mesh": mesh, "cuts": ["3", "6"], "split_size": 2},
        {"mesh": mesh, "cuts": ["3"], "split_size": 0},
    ]
    for options in cases:
        try:
            StagedOverRanks(chain(), **options)
        except ValueError as error:
            messages.append(str(error))
    staged = StagedOverRanks(chain(), mesh=mesh, cuts=["3"], split_size=2)
    for run in (staged.step, staged.evaluate):
        try:
            messages.append(run(torch.ones(4, 6)).output is not None)
        except (ValueError, StageError) as error:
            messages.append(str(error))
    return messages


def test_what_cannot_be_is_named(ranks):
    for messages in ranks(2).run(refusals):
        assert "the mesh has the axes ('shard',); stages need one called 'stage'" in messages[0]
        assert "2 cuts make 3 stages, but the mesh's 'stage' axis has 2 ranks" in messages[1]
        assert "split_size is 0" in messages[2]
        assert "the loss is a tensor (2, 6); it must be a scalar tensor" in messages[3]


def ddp_around_stages():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    staged = nn.parallel.DistributedDataParallel(Staged(copy.deepcopy(plain), cuts=["2"], split_size=3))
    calls = []

    def hook(state, bucket):
        calls.append(bucket.index())
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    staged.register_comm_hook(None, hook)
    torch.manual_seed(1)
    xs = torch.randn(3, 2, 11, 6)
    for x in xs:
        for model, batch in ((plain, x.flatten(0, 1)), (staged, x[dist.get_rank()])):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    for one, other in zip(plain.parameters(), staged.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6)
    return len(calls)


def test_ddp_around_stages_reduces_once_per_batch(ranks):
    assert ranks(2).run(ddp_around_stages) == [3, 3]


def train_on(folder, layout, first, last, dense="ddp"):
    """Steps ``first`` to ``last`` under a layout, from a checkpoint where there is one, to another."""
    names, sizes, cuts = layout
    mesh = mesh_of(names, sizes)
    staged = StagedOverRanks(
        dlrm(),
        mesh=mesh,
        cuts=cuts,
        split_size=5,
        plan=sharded_plan(names, sizes) if "shard" in names else None,
        sharders=[EmbeddingBagCollectionSharder(Adam(lr=0.01))],
        dense=dense,
    )
    optimizer = torch.optim.Adam(staged.dense_param_groups(), lr=0.01)
    state = {"model": staged, "tables": staged.fused_optimizer, "optimizer": optimizer}
    if first:
        load(folder / str(first), state)
    losses = []
    for step in range(first, last):
        optimizer.zero_grad()
        losses.append(float(staged.step(clicks(12, 100 * step + lane_of(mesh))).loss))
        optimizer.step()
    save(folder / str(last), state)
    return losses


def train_on_one(folder, first, last):
    model = dlrm()
    meshrec.fuse(model, optimizer=Adam(lr=0.01))
    tables = {id(p) for p in model.model.sparse_arch.parameters()}
    optimizer = torch.optim.Adam([p for p in model.parameters() if id(p) not in tables], lr=0.01)
    state = {"model": model, "tables": model.fused_optimizer, "optimizer": optimizer}
    if first:
        load(folder / str(first), state)
    for step in range(first, last):
        optimizer.zero_grad()
        joint(model, [clicks(12, 100 * step + lane) for lane in range(2)]).backward()
        optimizer.step()
    save(folder / str(last), state)
    return model.state_dict()


def test_checkpoints_fit_every_layout(ranks, tmp_path):
    expected = train_on_one(tmp_path / "one", 0, 4)
    ranks(4).run(train_on, tmp_path, (("shard", "stage"), (2, 2), ["model.over_arch"]), 0, 1)
    ranks(4).run(train_on, tmp_path, (("stage", "shard"), (2, 2), ["model.inter_arch"]), 1, 2, "fsdp2")
    train_on_one(tmp_path, 2, 3)
    ranks(4).run(train_on, tmp_path, (("shard", "stage"), (2, 2), ["model.dense_arch"]), 3, 4)
    found = train_on_one(tmp_path, 4, 4)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
