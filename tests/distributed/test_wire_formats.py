"""Coded wire formats in sharded modules: by table, at random, with feedback, the same on every plan."""

import logging
import os
import random

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from meshrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    Hashed,
    KeyedJaggedTensor,
    checkpoint,
)
from meshrec import distributed as md
from meshrec.comms.mesh import default_env
from meshrec.comms.wire import FORMATS
from meshrec.distributed import error_feedback
from meshrec.distributed.error_feedback import ErrorFeedback
from meshrec.model_parallel import DistributedModelParallel
from meshrec.optim import SGD, RowWiseAdagrad

ROWS = 12
NUM_PLANS = 26 if "MESHREC_THOROUGH" in os.environ else 6
SEED = int(os.environ.get("MESHREC_SEED", "0"))


def environment(in_nodes):
    if not in_nodes:
        return default_env()
    return md.ShardingEnv.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local")))


def collection_of(sequence=False):
    torch.manual_seed(SEED)
    kind = EmbeddingConfig if sequence else EmbeddingBagConfig
    configs = [
        kind(name="t0", num_embeddings=ROWS, embedding_dim=6, feature_names=["a", "b"]),
        kind(name="t1", num_embeddings=ROWS, embedding_dim=10, feature_names=["b"]),
    ]
    return (EmbeddingCollection if sequence else EmbeddingBagCollection)(tables=configs)


def features_of(rank, step, batch=4):
    generator = torch.Generator().manual_seed(10_000 * SEED + 100 * step + rank)
    lengths = torch.randint(0, 4, (2 * batch,), generator=generator)
    return KeyedJaggedTensor(
        ["a", "b"], torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator), lengths=lengths
    )


def values_of(output, sequence):
    if not sequence:
        return output.values()
    return torch.cat([each.values().flatten() for each in output.values()])


def whole_weights(module, sequence):
    folder = "embeddings" if sequence else "embedding_bags"
    state = module.state_dict()
    return {name: state[f"{folder}.{name}.weight"].full_tensor().clone() for name in ("t0", "t1")}


def trained(num_plans, precision, sequence, threads=1):
    """The weights after some steps under each plan, whole, and what the last lookup gave on this rank."""
    torch.set_num_threads(threads)
    env, found = default_env(), []
    sharder = md.EmbeddingCollectionSharder if sequence else md.EmbeddingBagCollectionSharder
    for builders in plans_of_equal_rectangles(num_plans):
        collection = collection_of(sequence)
        plan = md.construct_module_sharding_plan(collection, builders, world_size=env.shard.size)
        module = sharder(RowWiseAdagrad(lr=0.1), precision=precision).shard(collection, plan, env)
        for step in range(3):
            values = values_of(module(features_of(env.shard.rank, step)), sequence)
            (values * torch.linspace(0.5, 1.7, values.numel()).view_as(values)).sum().backward()
        found.append((whole_weights(module, sequence), values.detach()))
    torch.set_num_threads(1)
    return found


def same(one, other):
    return all(torch.equal(one[0][name], other[0][name]) for name in one[0]) and torch.equal(one[1], other[1])


def plans_of_equal_rectangles(number, num_ranks=4):
    """Plans that differ only in the rank of each rectangle: row parts, column parts, a whole table."""
    draw, found = random.Random(SEED), []
    for turn in range(number):
        rows, columns = draw.sample(range(num_ranks), num_ranks), draw.sample(range(num_ranks), 2)
        kinds = {
            "t0": md.row_wise(ranks=rows) if turn % 2 else md.table_wise(rank=rows[0]),
            "t1": md.column_wise(ranks=columns),
        }
        found.append(kinds)
    return found


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("format", ["int8", "int8+stochastic"])
def test_plans_of_equal_rectangles_give_equal_bits(ranks, format, sequence):
    """Drawn plans of two kinds of rectangles; with MESHREC_THOROUGH 104 in all."""
    precision = md.CommsPrecision(format, format)
    for found in ranks(4).run(trained, NUM_PLANS, precision, sequence):
        for plan, result in enumerate(found):
            assert same(result, found[plan % 2]), plan


def test_threads_give_equal_bits(ranks):
    precision = md.CommsPrecision("int4+stochastic", "int8+stochastic+feedback")
    for sequence in (False, True):
        one, two = (ranks(4).run(trained, 2, precision, sequence, n) for n in (1, 2))
        assert all(same(x, y) for a, b in zip(one, two, strict=True) for x, y in zip(a, b, strict=True))


def resumed(folder, backward, in_nodes):
    """Whether a run that resumes from a checkpoint has the weights of a run that goes on, bit by bit."""
    precision, env = md.CommsPrecision("int8+stochastic", backward), environment(in_nodes)
    builders = {"t0": md.row_wise(), "t1": md.table_wise(rank=1)}

    def made():
        plan = md.construct_module_sharding_plan(
            collection_of(), builders, world_size=env.shard.size, local_size=env.local_size
        )
        sharder = md.EmbeddingBagCollectionSharder(
            RowWiseAdagrad(lr=0.1), precision=precision, across_nodes="rows" if in_nodes else "sums"
        )
        return DistributedModelParallel(
            collection_of(), env, plan=md.ShardingPlan({"": plan}), sharders=[sharder]
        )

    def train(model, steps):
        for step in steps:
            model(features_of(env.shard.rank, step)).values().square().sum().backward()

    first, second = made(), made()
    train(first, range(4))
    checkpoint.save(folder, {"model": first, "tables": first.fused_optimizer})
    train(second, [9])  # its residuals are replaced
    checkpoint.load(folder, {"model": second, "tables": second.fused_optimizer})
    for model in (first, second):
        train(model, [0, 1])
    one, other = (whole_weights(model.module, False) for model in (first, second))
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("backward", ["int8+stochastic", "int8+feedback"])
def test_a_resumed_run_rounds_as_the_first_did(ranks, tmp_path, backward):
    assert all(ranks(2).run(resumed, tmp_path / "flat", backward, False))


def test_residuals_between_nodes_are_in_checkpoints(ranks, tmp_path):
    assert all(ranks(4).run(resumed, tmp_path / "rows", "int8+stochastic+feedback", True))


FED = md.CommsPrecision("int8", "int8+feedback")


def with_feedback(rank_of_t0):
    env = default_env()
    builders = {"t0": md.table_wise(rank=rank_of_t0), "t1": md.table_wise(rank=0)}
    plan = md.construct_module_sharding_plan(collection_of(), builders, world_size=env.shard.size)
    sharder = md.EmbeddingBagCollectionSharder(RowWiseAdagrad(lr=0.1), precision=FED)
    return DistributedModelParallel(
        collection_of(), env, plan=md.ShardingPlan({"": plan}), sharders=[sharder]
    )


def steps(model, numbers):
    for step in numbers:
        model(features_of(default_env().shard.rank, step)).values().square().sum().backward()


def saved_with_residuals(folder):
    model = with_feedback(rank_of_t0=0)  # all tables: only the other ranks have residuals
    steps(model, range(3))
    checkpoint.save(folder, {"model": model, "tables": model.fused_optimizer})


def loaded_elsewhere(folder, rank_of_t0):
    """The log of a load into a model with residuals, and whether this model then goes on as a new one."""
    used, new = with_feedback(rank_of_t0), with_feedback(rank_of_t0)
    steps(used, [7, 8])
    messages = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("meshrec").addHandler(handler)
    try:
        checkpoint.load(folder, {"model": used, "tables": used.fused_optimizer})
    finally:
        logging.getLogger("meshrec").removeHandler(handler)
    checkpoint.load(folder, {"model": new, "tables": new.fused_optimizer})
    found = []
    for model in (used, new):
        steps(model, [0, 1])
        found.append(whole_weights(model.module, False))
    return messages, all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize(
    ("num_ranks", "rank_of_t0", "lines"), [(2, 0, 0), (2, 1, 1), (4, 0, 1)], ids=["same", "plan", "ranks"]
)
def test_feedback_begins_anew_under_another_plan_and_one_line_says_so(
    ranks, tmp_path, num_ranks, rank_of_t0, lines
):
    ranks(2).run(saved_with_residuals, tmp_path / "saved")
    found = ranks(num_ranks).run(loaded_elsewhere, tmp_path / "saved", rank_of_t0)
    assert all(is_same for _, is_same in found)
    messages = [message for each, _ in found for message in each]
    assert len(messages) == lines
    assert all("'model'" in message for message in messages)


def by_table(precision):
    env, collection = default_env(), collection_of()
    plan = md.construct_module_sharding_plan(
        collection, {"t0": md.table_wise(rank=0), "t1": md.table_wise(rank=1)}, world_size=env.shard.size
    )
    module = md.EmbeddingBagCollectionSharder(SGD(lr=0.1), precision=precision).shard(collection, plan, env)
    with md.measure_traffic() as traffic:
        values = module(features_of(env.shard.rank, 0)).values()
        values.sum().backward()
    exact = collection(features_of(env.shard.rank, 0)).values()
    errors = (values - exact).abs().split([12, 10], 1)
    return dict(traffic), [each.max().item() for each in errors]


def test_tables_of_one_module_travel_in_formats_of_their_own(ranks):
    precision = md.CommsPrecision("fp32", "bf16", {"t1": md.CommsPrecision("int4", "int8")})
    (first, errors), (second, _) = ranks(2).run(by_table, precision)
    assert errors[0] < 1e-6 < errors[1] < 0.5
    bags = 4
    assert first["embeddings"] == bags * 2 * 6 * 4  # rank 0 has t0, and sends fp32
    assert second["embeddings"] == bags * (10 // 2 + 8)
    assert first["gradients of embeddings"] == bags * (10 + 8)  # of rank 1's table, int8
    assert second["gradients of embeddings"] == bags * 2 * 6 * 2


def damaged():
    env, collection = default_env(), collection_of()
    collection.embedding_bags["t1"].weight.data[3, 2] = torch.inf
    plan = md.construct_module_sharding_plan(
        collection, {"t0": md.table_wise(rank=0), "t1": md.table_wise(rank=0)}, world_size=env.shard.size
    )
    precision = md.CommsPrecision("int8", "int8")
    module = md.EmbeddingBagCollectionSharder(SGD(lr=0.1), precision=precision).shard(collection, plan, env)
    features = KeyedJaggedTensor(["a", "b"], torch.tensor([0, 1, 3, 2]), lengths=torch.tensor([1, 1, 1, 1]))
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("meshrec").addHandler(handler)
    try:
        values = [module(features).values() for _ in range(2)][1]
    finally:
        logging.getLogger("meshrec").removeHandler(handler)
    return values[0, 12 + 2].item(), bool(values[1].isfinite().all()), messages


def test_infinity_arrives_and_is_named_once(ranks):
    (value, is_rest_finite, messages), (other, _, none) = ranks(2).run(damaged)
    assert value == other == torch.inf
    assert is_rest_finite
    assert len(messages) == 1
    assert "table 't1', feature 'b': embeddings for row" in messages[0]
    assert "2 pairs of row and column" in messages[0]
    assert "row 0 of rank 0's batch" in messages[0]
    assert none == []


def drift(format, sequence, in_nodes=False):
    """How far weights are from those of fp32 gradients after steps with the same bags and gradients."""
    env = environment(in_nodes)
    sharder, found = md.EmbeddingCollectionSharder if sequence else md.EmbeddingBagCollectionSharder, []
    for backward in ("fp32", format):
        collection = collection_of(sequence)
        plan = md.construct_module_sharding_plan(
            collection,
            {"t0": md.row_wise(), "t1": md.table_wise(rank=1)},
            world_size=env.shard.size,
            local_size=env.local_size,
        )
        precision = md.CommsPrecision("fp32", backward)
        module = sharder(SGD(lr=0.01), precision=precision).shard(collection, plan, env)
        for step in range(40):
            values = values_of(module(features_of(env.shard.rank, step % 2)), sequence)
            (values * torch.linspace(0.013, 1.7, values.numel()).view_as(values)).sum().backward()
        found.append(whole_weights(module, sequence))
    return max((found[0][name] - found[1][name]).abs().max().item() for name in found[0])


@pytest.mark.parametrize("sequence", [False, True])
def test_feedback_keeps_errors_from_adding_up(ranks, sequence):
    plain = max(ranks(2).run(drift, "int8", sequence))
    fed = max(ranks(2).run(drift, "int8+feedback", sequence))
    assert fed < plain / 5


def hashed_drift(format):
    """How far rows of a hashed table are from those of fp32 gradients after steps with the same IDs."""
    env, rows = default_env(), []
    config = EmbeddingConfig(
        name="t",
        embedding_dim=6,
        feature_names=["a", "b"],
        keys=Hashed(max_rows=32),
        init_fn=torch.nn.init.zeros_,
    )
    for backward in ("fp32", format):
        collection = EmbeddingCollection(tables=[config])
        plan = md.construct_module_sharding_plan(collection, {"t": md.row_wise()}, world_size=env.shard.size)
        precision = md.CommsPrecision("fp32", backward)
        module = md.EmbeddingCollectionSharder(SGD(lr=0.01), precision=precision).shard(collection, plan, env)
        for step in range(40):
            values = values_of(module(features_of(env.shard.rank, step % 2)), sequence=True)
            (values * torch.linspace(0.013, 1.7, values.numel())).sum().backward()
        rows.append(values_of(module(features_of(env.shard.rank, 0)), sequence=True).detach())
    return (rows[0] - rows[1]).abs().max().item()


def test_feedback_names_the_rows_of_a_hashed_table_by_their_keys(ranks):
    plain, fed = (max(ranks(2).run(hashed_drift, format)) for format in ("int8", "int8+feedback"))
    assert fed < plain / 5


def test_feedback_works_between_nodes(ranks):
    assert max(ranks(4).run(drift, "int8+feedback", False, True)) < max(
        ranks(4).run(drift, "int8", False, True)
    )


def test_feedback_forgets_the_bags_not_seen_for_longest(monkeypatch, caplog):
    from meshrec.comms.encoding import Block, Columns

    monkeypatch.setattr(error_feedback, "CAPACITY", 3)
    columns = Columns((2,), (FORMATS["int8+feedback"],), (0,), (0,), ("t",), (0,))
    feedback = ErrorFeedback()

    def send(bags):
        rows = torch.tensor([[float(bag), 1.0] for bag in bags])
        values = feedback.add_residuals(
            rows.flatten(), [Block(len(bags), columns)], lambda *_: torch.tensor(bags)
        )
        feedback.store_errors(values, torch.zeros_like(values))  # everything is lost
        return values.view(-1, 2)

    send([5, 1])
    assert send([1, 7, 1]).tolist() == [[2.0, 2.0], [7.0, 1.0], [1.0, 1.0]]
    with caplog.at_level(logging.WARNING, "meshrec"):
        send([8])  # 5 is forgotten
    assert "error feedback remembers 3 bags" in caplog.text
    assert send([5, 8]).tolist() == [[5.0, 1.0], [16.0, 2.0]]
