"""Quantised models over ranks: the same numbers under every plan, moved and saved bit by bit."""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch

from meshrec import DataType
from meshrec import distributed as md
from meshrec.checkpoint import load, save
from meshrec.comms.mesh import default_env
from meshrec.model_parallel import DistributedModelParallel
from meshrec.planner import EmbeddingShardingPlanner, Topology, evaluate
from meshrec.planner.module_tables import tables_of_model
from meshrec.quant import quantize
from meshrec.quant import sharded as sharded_quantisation
from meshrec.tables.module import TableModule
from meshrec.testing import RankError

_path = Path(__file__).parents[1] / "checkpoint" / "models.py"
_spec = importlib.util.spec_from_file_location("checkpoint_models", _path)
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)

INT8, INT4, INT2, FP16 = DataType.INT8, DataType.INT4, DataType.INT2, DataType.FP16
TYPES = {"t0": INT2, "t1": INT4, "t2": INT8}
WHOLE_ROWS = ("tw", "dp", "cw")


def quantised(seed=0, types=TYPES, **options):
    model = models.Model()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return quantize(model, per_table=types, **options)


def sharded(kind, model):
    return DistributedModelParallel(copy.deepcopy(model), plan=models.make_plan(kind), dense=None)


def every_plan(output_dtype=None, types=TYPES):
    model = quantised(output_dtype=output_dtype, types=types)
    features, results = models.batch(1), {}
    expected = model.ebc(features).values()
    made = sharded("rw", model)
    for kind in models.KINDS:
        made.reshard(models.make_plan(kind))
        fresh = sharded(kind, model)
        for each in (fresh, made):
            found = each.module.ebc(features).values()
            assert found.dtype == expected.dtype
            results.setdefault(kind, []).append((found - expected).abs().max().item())
        whole = models.whole(fresh.state_dict())
        assert [name for name, value in model.state_dict().items() if not same(value, whole[name])] == []
    return results


def same(one, other):
    return one.shape == other.shape and torch.equal(one.float(), torch.as_tensor(other).float())


@pytest.mark.parametrize("world_size", [1, 2])
def test_results_do_not_depend_on_the_plan(ranks, world_size):
    for results in ranks(world_size).run(every_plan):
        assert all(differ == [0.0, 0.0] for kind, differ in results.items() if kind in WHOLE_ROWS)
        assert all(max(differ) < 1e-5 for differ in results.values())


def test_mixed_with_numbers_and_half_outputs(ranks):
    for results in ranks(2).run(every_plan, FP16, {"t0": INT8, "t1": DataType.FP32, "t2": FP16}):
        assert all(max(differ) < 0.02 for differ in results.values())
        assert all(differ == [0.0, 0.0] for kind, differ in results.items() if kind in WHOLE_ROWS)


def saved_and_loaded(folder):
    model = quantised()
    save(folder / "whole", {"model": sharded("cw", model)})
    wrong = []
    for kind in ("rw", "grid", "tw"):
        other = sharded(kind, quantised(seed=1))
        load(folder / "whole", {"model": other})
        if not torch.equal(other(models.batch(2)), sharded(kind, model)(models.batch(2))):
            wrong.append(kind)
        save(folder / kind, {"model": other})
    plain = quantised(seed=2)
    load(folder / "grid", {"model": plain})
    states = zip(plain.state_dict().items(), model.state_dict().values(), strict=True)
    return wrong + [name for (name, value), wanted in states if not torch.equal(value, wanted)]


def test_checkpoints_go_from_plan_to_plan(ranks, tmp_path):
    assert ranks(2).run(saved_and_loaded, tmp_path) == [[], []]


def loaded_in_part():
    """A state dict whose biases are of another plan: nothing of the table changes."""
    made, other = sharded("rw", quantised()), sharded("cw", quantised(seed=1))
    before = models.whole(made.state_dict())
    bias = "ebc.embedding_bags.t2.weight_qbias"
    whole = {name: value for name, value in quantised(seed=1).state_dict().items() if ".t2." in name}
    state = {**whole, bias: other.state_dict()[bias]}
    try:
        made.load_state_dict(state, strict=False)
        said = ""
    except RuntimeError as error:
        said = str(error)
    after = models.whole(made.state_dict())
    return "t2.weight_qbias: the state dict holds other rectangles" in said, models.differences(after, before)


def test_a_table_is_loaded_whole_or_not_at_all(ranks):
    assert ranks(2).run(loaded_in_part) == [(True, [])] * 2


def from_meta():
    """Quantised tables on meta are drawn as the whole ones are, whatever the plan."""
    results = []
    for kind in ("tw", "rw", "cw"):
        torch.manual_seed(5)
        model = quantize(models.Model("meta"), INT8)
        made = DistributedModelParallel(model, plan=models.make_plan(kind), dense=None, init_parameters=False)
        results.append(made.module.ebc(models.batch(0)).values())
    return [torch.allclose(results[0], other, atol=1e-6) and bool(other.any()) for other in results]


def test_tables_on_meta(ranks):
    assert ranks(2).run(from_meta) == [[True] * 3] * 2


def planned_bytes():
    model = quantize(wide_model())
    plan = EmbeddingShardingPlanner(topology=Topology(world_size=2, compute_device="cpu")).plan(
        model, md_sharders()
    )
    made = DistributedModelParallel(model, plan=plan, sharders=md_sharders(), dense=None)
    return sum(shards.weight.nbytes for shards in made.modules() if isinstance(shards, TableModule))


def md_sharders():
    return [md.EmbeddingBagCollectionSharder(), md.EmbeddingCollectionSharder()]


def wide_model():
    from meshrec import EmbeddingBagCollection, EmbeddingBagConfig

    sizes = ((40000, 64), (30000, 32), (20000, 128), (50000, 16))
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(name=f"t{i}", num_embeddings=rows, embedding_dim=dim, feature_names=[f"f{i}"])
            for i, (rows, dim) in enumerate(sizes)
        ],
        device="meta",
    )


def test_the_planner_knows_the_bytes():
    model = quantize(wide_model(), INT4, per_table={"t2": INT8})
    tables = tables_of_model(model)
    assert [table.num_bytes for table in tables] == [40000 * 36, 30000 * 20, 20000 * 132, 50000 * 12]
    assert not any(table.trained for table in tables)
    topology = Topology(world_size=2, compute_device="cpu")
    plan = EmbeddingShardingPlanner(topology=topology).plan(model, md_sharders())
    estimate = evaluate(plan, tables, topology, batch_size=64)
    assert estimate.phases["update"] <= topology.profile.kernel_seconds
    held = sum(table.num_bytes for table in tables)
    assert held <= estimate.bytes_R.sum() <= held * 1.01 + 64 * 2 * 2 * 240 * 8


def test_planned_bytes_are_held(ranks):
    expected = sum(table.num_bytes for table in tables_of_model(quantize(wide_model())))
    assert abs(sum(ranks(2).run(planned_bytes)) / expected - 1) < 0.01


def with_an_optimizer():
    sharders = [md.EmbeddingBagCollectionSharder(models.SPECS["rowwise"])]
    DistributedModelParallel(quantised(), plan=models.make_plan("tw"), sharders=sharders)


def cut_within_a_byte():
    sharded("cw", quantised(types={"t2": INT4}))


def moved_to_a_cut_within_a_byte():
    sharded("rw", quantised(types={"t2": INT4})).reshard(models.make_plan("cw"))


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (with_an_optimizer, "'t0'"),
        (moved_to_a_cut_within_a_byte, "'t2'.*column 3"),
        (cut_within_a_byte, "'t2'.*column 3.*2"),
    ],
)
def test_refusals_on_every_rank(ranks, run, words):
    with pytest.raises(RankError, match=words):
        ranks(2).run(run)


def from_sharded(types):
    """Quantised where it is sharded, under every plan, and quantised whole: the same bits."""
    expected = {
        name: value.clone() for name, value in quantize(models.Model(), per_table=types).state_dict().items()
    }
    wrong = []
    for kind in models.KINDS:
        made, _ = models.make(kind)
        before = models.whole(made.state_dict())
        small = quantize(made, per_table=types)
        after = models.whole(small.state_dict())
        wrong += [(kind, name) for name, value in expected.items() if not same(value, after[name])]
        wrong += models.differences(models.whole(made.state_dict()), before)
        features = models.batch(0)
        if not torch.allclose(small(features), made(features), atol=0.5):
            wrong.append(kind)
        small.reshard(models.make_plan("tw"))
        wrong += [] if small.dense_gradient_averager is None else [(kind, "gradients")]
    return wrong


@pytest.mark.parametrize("world_size", [1, 2])
def test_sharded_models_are_quantised_where_they_are(ranks, world_size):
    types = {"t0": INT2, "t1": INT4, "t2": DataType.BF16}
    assert ranks(world_size).run(from_sharded, types) == [[]] * world_size


def with_a_bad_row(kind, rounding="minmax"):
    made, _ = models.make(kind)
    for module in made.modules():
        if isinstance(module, TableModule):
            for rectangle, shard in zip(module.rectangles, module.shards(), strict=True):
                if rectangle.table == 1 and rectangle.r0 <= 7 < rectangle.r1 and rectangle.c1 == 4:
                    shard.data[7 - rectangle.r0, -1] = torch.nan
    quantize(made, INT8, rounding=rounding)


def test_bad_rows_are_told_on_every_rank(ranks):
    for kind in ("cw", "tw", "rw"):
        with pytest.raises(RankError, match=r"rank 0:[^$]*table 't1': row [^$]*rank 1:[^$]*table 't1': row "):
            ranks(2).run(with_a_bad_row, kind)
    with pytest.raises(RankError, match="'search'"):
        ranks(2).run(with_a_bad_row, "cw", "search")


def with_a_failing_rank(kind, name, error):
    made, _ = models.make(kind)

    def fail(*_, **__):
        raise error

    with pytest.MonkeyPatch.context() as patch:
        if default_env().world.rank == 1:
            patch.setattr(sharded_quantisation, name, fail)
        try:
            quantize(made, INT8)
        except Exception as caught:
            return type(caught), str(caught)


@pytest.mark.parametrize(("kind", "name"), [("tw", "encode_rows"), ("cw", "check_rows")])
@pytest.mark.parametrize("error", [ValueError("no"), RuntimeError("no"), OSError("no")])
def test_any_error_of_one_rank_is_the_same_on_all(ranks, kind, name, error):
    named = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    expected = ValueError if isinstance(error, ValueError) else RuntimeError, f"rank 1: {named}no"
    assert ranks(2).run(with_a_failing_rank, kind, name, error) == [expected] * 2


def floats_into_codes():
    made = sharded("cw", quantised())
    with pytest.raises(RuntimeError, match=r"t0\.weight.*2 bits"):
        made.load_state_dict(models.Model().state_dict())
    other = sharded("cw", quantised(seed=1))
    other.load_state_dict(made.state_dict())
    return torch.equal(other(models.batch(0)), made(models.batch(0)))


def test_state_dicts(ranks):
    assert ranks(2).run(floats_into_codes) == [True, True]
