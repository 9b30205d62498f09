"""Quantised hashed tables: rows as those of a fixed table, unknown IDs by their quantised first rows."""

import importlib.util
import warnings
from pathlib import Path

import pytest
import torch

import meshrec
from meshrec import DataType
from meshrec import distributed as md
from meshrec.checkpoint import load, save
from meshrec.comms.mesh import default_env
from meshrec.export import Predictor, export
from meshrec.model_parallel import DistributedModelParallel
from meshrec.modules.table_lookup import storage_of
from meshrec.ops import nbit
from meshrec.quant import choose_precision, quantised_about, quantize, quantize_checkpoint, table_bytes
from meshrec.quant.precision import encode_rows

_spec = importlib.util.spec_from_file_location(
    "hashed_models", Path(__file__).parents[1] / "export" / "hashed_models.py"
)
made = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made)

TYPES = [DataType.INT8, DataType.INT4, DataType.INT2, DataType.FP16]


def fresh(seed=3):
    return made.drawn_model(seed, max_rows=40, evict=made.LRU(), admit=None)


@pytest.fixture(scope="module")
def trained():
    model = fresh()
    return model.eval(), made.trained(model, 3)


def batches(seen):
    return [made.drawn_batch(size, made.drawn_ids(size, seen), size) for size in (0, 1, 150)]


@pytest.mark.parametrize("rounding", ["minmax", "search"])
@pytest.mark.parametrize("data_type", TYPES)
def test_rows_are_those_of_a_quantised_table(trained, data_type, rounding):
    """Of every ID: its row, quantised, or its quantised first row."""
    model, seen = trained
    before = made.contents(model)
    small = quantize(model, data_type, rounding=rounding)
    for module, own in ((small.bags, model.bags), (small.sequences, model.sequences)):
        for config, _ in module.tables().values():
            if config.keys is None:
                continue
            table, source = module.hashed_tables()[config.name], own.hashed_tables()[config.name]
            ids = made.drawn_ids(1, seen).unique()
            known, rows, _ = source.items()
            storage = source.storage
            numbers = storage.initial.values(ids).to(storage.dtype)
            first = numbers = storage.initial.values(ids)
            expected = encode_rows(first, data_type, "minmax", "t")
            place = {int(each): at for at, each in enumerate(known)}
            coded = encode_rows(rows, data_type, rounding, "t")
            for at, each in enumerate(ids.tolist()):
                if each in place:
                    expected[at] = coded[place[each]]
            keys = meshrec.ops.index.mix(ids, storage.keys.seed)
            slots = table.resolve(keys, train=False)
            found = table.rows[slots.slots]
            assert torch.equal(found, expected), config.name
            assert numbers is first
    for batch in batches(seen):
        assert made.evaluated(small, *batch).isfinite().all()
    assert made.same(made.contents(model), before)


@pytest.mark.parametrize("data_type", [DataType.INT8, DataType.INT4, DataType.INT2])
def test_packages_give_the_bits_of_evaluation(trained, data_type, tmp_path):
    model, seen = trained
    small = quantize(model, DataType.INT8, per_table={"h0": data_type, "h2": data_type, "f": DataType.INT4})
    options = {"features": made.FEATURES, "num_dense": made.NUM_DENSE, "scores": None, "compile": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own code
        predictor = Predictor(export(small, tmp_path / "package", rounding="minmax", **options))
    assert predictor.quantised["bags.embedding_bags.h0.weight"] == str(data_type)
    for batch in batches(seen):
        assert torch.equal(predictor(*batch), made.evaluated(small, *batch))


def test_state_dicts_and_checkpoints_hold_the_codes(trained, tmp_path):
    model, seen = trained
    small = quantize(model, DataType.INT4)
    state = small.state_dict()
    name = "bags.embedding_bags.h0"
    num, dim = model.bags.hashed_tables()["h0"].num_alive, model.bags.embedding_bag_configs()[0].embedding_dim
    assert state[f"{name}.weight"].shape == (num, nbit.code_bytes(dim, 4))
    assert state[f"{name}.weight_qscale"].shape == (num,)
    assert state[f"{name}.ids"].shape == (num,)
    other, third = (quantize(fresh(), DataType.INT4) for _ in range(2))
    other.load_state_dict({key: value.clone() for key, value in state.items()})
    save(tmp_path / "saved", {"model": small, "quantised": quantised_about(small)})
    load(tmp_path / "saved", {"model": third})
    for batch in batches(seen):
        expected = made.evaluated(small, *batch)
        assert torch.equal(made.evaluated(other, *batch), expected)
        assert torch.equal(made.evaluated(third, *batch), expected)


def test_a_state_of_numbers_is_refused(trained):
    model, _ = trained
    small = quantize(fresh(), DataType.INT8)
    with pytest.raises(RuntimeError, match="8 bits"):
        small.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, strict=False)
    state = {key: value.clone() for key, value in small.state_dict().items() if "qscale" not in key}
    with pytest.raises(RuntimeError, match="weight_qscale"):
        small.load_state_dict(state)


@pytest.mark.parametrize("data_type", TYPES)
def test_a_checkpoint_is_quantised_as_it_streams(trained, data_type, tmp_path):
    model, seen = trained
    save(tmp_path / "saved", {"model": model})
    small, expected = quantize_checkpoint(tmp_path / "saved", fresh(), data_type), quantize(model, data_type)
    for batch in batches(seen):
        assert torch.equal(made.evaluated(small, *batch), made.evaluated(expected, *batch))


def test_bytes_are_those_of_the_rows_that_are_there(trained):
    model, _ = trained
    table = model.bags.hashed_tables()["h0"]
    small = quantize(model, DataType.INT8)
    assert table_bytes(small)["h0"] == table.num_alive * nbit.row_bytes(table.storage.dim, 8)
    said = quantised_about(small)["tables"]["h0"]
    assert said["bytes"] == table_bytes(small)["h0"]


def test_a_precision_is_chosen_for_each_table(trained):
    model, seen = trained
    batch = made.drawn_batch(1, made.drawn_ids(1, seen), 100)
    losses = lambda scored: made.evaluated(scored, *batch).double().square().mean(1) + 1  # noqa: E731
    choice = choose_precision(model, losses, max_loss=0.01)
    assert choice.types.keys() == {"h0", "h1", "h2", "f"}
    assert any(each.bits for each in choice.types.values())


def test_a_row_that_cannot_be_quantised_is_named():
    config = meshrec.EmbeddingBagConfig(
        name="h", embedding_dim=4, feature_names=["a"], keys=meshrec.Hashed(max_rows=10)
    )
    bags = meshrec.EmbeddingBagCollection([config])
    ids = torch.tensor([5, -7])
    storage = storage_of(config)
    rows = storage.initial.values(ids)
    rows[1, 2] = float("nan")
    name = "embedding_bags.h"
    bags.load_state_dict({f"{name}.weight": rows, f"{name}.ids": ids})
    for data_type in (DataType.INT8, DataType.FP16):
        with pytest.raises(ValueError, match=r"'h'.*ID.*-7.*NaN"):
            quantize(bags, data_type)


def test_a_quantised_table_is_not_trained(trained):
    model, _ = trained
    small = quantize(model, DataType.INT8)
    with pytest.raises(ValueError, match="quantised"):
        meshrec.fuse(small.bags, optimizer=meshrec.optim.SGD(lr=0.1))


BUILDERS = {
    "rows": md.row_wise,
    "columns": lambda: md.column_wise(ranks=[0, 1]),
    "one": lambda: md.table_wise(rank=1),
    "everywhere": md.data_parallel,
}


def test_rows_of_a_sharded_table_in_a_file_are_quantised_to_memory(tmp_path):
    config = meshrec.EmbeddingBagConfig(
        name="t",
        embedding_dim=8,
        feature_names=["f"],
        keys=meshrec.Hashed(max_rows=20),
        storage=meshrec.FileRows(path=tmp_path, cache_rows=8),
    )
    model = torch.nn.ModuleDict({"e": meshrec.EmbeddingBagCollection([config], device="meta")})
    sharder = md.EmbeddingBagCollectionSharder(meshrec.optim.SGD(lr=0.1))
    sharded = DistributedModelParallel(model, md.ShardingEnv.single_process(), sharders=[sharder])
    features = meshrec.KeyedJaggedTensor(["f"], torch.arange(6), lengths=torch.ones(6).int())
    sharded.module["e"](features).values().sum().backward()
    made = quantize(sharded, DataType.INT8)
    with torch.no_grad():
        expected, rows = (each.module["e"](features).values() for each in (sharded, made))
    assert torch.allclose(rows, expected, atol=0.01)
    assert made.module["e"].embedding_bags["t"].tables[0].store.file is None


def spread(model, kind):
    """A model whose tables lie over the ranks."""
    plan = {}
    for name, module in (("bags", model.bags), ("sequences", model.sequences)):
        builders = {config.name: BUILDERS[kind]() for config, _ in module.tables().values()}
        size = default_env().shard.size
        plan[name] = md.construct_module_sharding_plan(module, builders, world_size=size, local_size=1)
    return DistributedModelParallel(
        model, default_env(), plan=md.ShardingPlan(plan), init_data_parallel=False
    )


def plain(seed):
    """A model of widths that all plans can cut, with rows of IDs from everywhere."""
    model = made.drawn_model(seed, widths=(8, 16), max_rows=40, evict=made.LRU(), admit=None)
    return model, made.trained(model, seed)


def on_ranks(kind, data_type):
    """Quantised and then sharded; sharded and then quantised; moved to another plan: as unsharded."""
    model, seen = plain(5)
    for module in (model.bags, model.sequences):
        module.requires_grad_(False)
    small = quantize(model, data_type)
    batch = made.drawn_batch(7 + default_env().world.rank, made.drawn_ids(2, seen), 40)
    expected = made.evaluated(small, *batch)
    later = spread(quantize(model, data_type), kind)
    first = quantize(spread(unfused(model), kind), data_type)
    found = [made.evaluated(later, *batch), made.evaluated(first, *batch)]
    later.reshard(spread(quantize(model, data_type), "rows" if kind == "one" else "one").plan)
    found.append(made.evaluated(later, *batch))
    state = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for name, value in first.state_dict().items()
    }
    whole = small.state_dict()
    same = [name for name in whole if not torch.equal(whole[name].clone(), state[name])]
    return expected, found, same


def unfused(model):
    """The model without its optimizer."""
    other = made.drawn_model(5, widths=(8, 16), max_rows=40, evict=made.LRU(), admit=None)
    other.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    return other.requires_grad_(False)


@pytest.mark.parametrize(
    ("kind", "data_type"),
    [
        ("rows", DataType.INT8),
        ("columns", DataType.INT4),
        ("one", DataType.INT2),
        ("everywhere", DataType.INT8),
        ("columns", DataType.FP16),
    ],
)
def test_sharded_inference_equals_the_unsharded_model(ranks, kind, data_type):
    for expected, found, differ in ranks(2).run(on_ranks, kind, data_type):
        assert differ == []
        plans = [kind, kind, "rows" if kind == "one" else "one"]
        for plan, each in zip(plans, found, strict=True):
            if plan == "rows":  # sums of bags are added in another order
                torch.testing.assert_close(each, expected)
            else:
                assert torch.equal(each, expected)
