"""Rows by ID: Parquet files, and fixed tables loaded from hashed ones."""

import copy

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, Hashed, KeyedJaggedTensor, checkpoint, fuse
from meshrec import distributed as md
from meshrec.checkpoint import export_rows, import_rows, row_files
from meshrec.comms.mesh import default_env
from meshrec.model_parallel import DistributedModelParallel
from meshrec.optim import Adam
from meshrec.tables import LRU, MinCount

EDGES = [-1, 0, 2**63 - 1, -(2**63), 5]


def make(keys, *, data_type=None, dim=6, trained=None, num=12):
    """``keys``: None for a fixed table of ``num`` rows."""
    rows = {"num_embeddings": num} if keys is None else {"keys": keys}
    config = EmbeddingBagConfig(name="t", embedding_dim=dim, feature_names=["f"], **rows)
    other = EmbeddingBagConfig(name="u", embedding_dim=4, feature_names=["g"], num_embeddings=5)
    model = torch.nn.ModuleDict({"ebc": EmbeddingBagCollection([config, other])})
    fuse(model, optimizer=Adam(lr=0.1))
    for ids in trained or ():
        step(model["ebc"], ids)
    return model


def step(ebc, ids):
    count = len(ids)
    values = torch.tensor([*ids, *[1] * count])
    out = ebc(KeyedJaggedTensor(["f", "g"], values, lengths=torch.ones(2 * count).int()))
    out.values().square().sum().backward()


def saved(model, folder):
    checkpoint.save(folder, {"model": model, "tables": model.fused_optimizer})
    return folder


def rows_of(model):
    """Return the weight and the state of each ID of table t."""
    hashed = model["ebc"].hashed_tables()
    if hashed:
        ids, weight, state = hashed["t"].items()
    else:
        weight = model["ebc"].embedding_bags["t"].weight.detach()
        ids = torch.arange(len(weight))
        state = model["ebc"].fused_optimizer.state_dict()["state"]["embedding_bags.t.weight"]
    parts = [weight, *(state[name] for name in ("exp_avg", "exp_avg_sq"))]
    return {each: [part[at].tolist() for part in parts] for at, each in enumerate(ids.tolist())}


@pytest.mark.parametrize("optimizer", [True, False])
def test_rows_go_through_a_file(tmp_path, optimizer):
    first = make(Hashed(max_rows=20, evict=LRU()), trained=[EDGES, [7, 8, 5]])
    saved(first, tmp_path / "a")
    assert export_rows(tmp_path / "a", tmp_path / "t.parquet", "t", optimizer=optimizer) == 7
    found = pq.read_table(tmp_path / "t.parquet")
    assert found.column_names == ["id", "row", *(["exp_avg", "exp_avg_sq"] if optimizer else [])]
    assert found.schema.field("row").type == pa.list_(pa.float32(), 6)
    second = make(Hashed(max_rows=9, seed=3, admit=MinCount(2)), trained=[[100, 101]] * 3)
    assert import_rows(tmp_path / "t.parquet", second, "t", optimizer=optimizer) == 7
    one, other = rows_of(first), rows_of(second)
    assert one.keys() == other.keys() == {*EDGES, 7, 8}
    assert [each[0] for each in one.values()] == [other[id_][0] for id_ in one]
    assert (one == other) == optimizer
    if not optimizer:
        assert not np.any([each[1:] for each in other.values()])
    step(second["ebc"], [7, 100])


def test_a_fixed_table_is_read_into_a_hashed_one_and_back(tmp_path):
    fixed = make(None, trained=[[3, 4, 5]])
    saved(fixed, tmp_path / "a")
    export_rows(tmp_path / "a", tmp_path / "t.parquet", "ebc.embedding_bags.t", optimizer=True)
    hashed = make(Hashed(max_rows=12))
    import_rows(tmp_path / "t.parquet", hashed, "t", optimizer=True)
    assert rows_of(hashed) == rows_of(fixed)
    hashed = make(Hashed(max_rows=12))
    checkpoint.load(tmp_path / "a", {"model": hashed, "tables": hashed.fused_optimizer})
    assert rows_of(hashed) == rows_of(fixed)
    saved(hashed, tmp_path / "b")
    export_rows(tmp_path / "b", tmp_path / "u.parquet", "t", optimizer=True)
    back = make(None)
    import_rows(tmp_path / "u.parquet", back, "t", optimizer=True)
    assert rows_of(back) == rows_of(fixed)
    checkpoint.load(tmp_path / "b", {"model": (other := make(None)), "tables": other.fused_optimizer})
    assert rows_of(other) == rows_of(fixed)
    assert torch.equal(other["ebc"].embedding_bags["u"].weight, hashed["ebc"].embedding_bags["u"].weight)
    for model in (fixed, other):
        step(model["ebc"], [3, 11])
    assert rows_of(other) == rows_of(fixed)


def test_rows_that_a_hashed_table_lacks_stay(tmp_path):
    hashed = make(Hashed(max_rows=12, evict=LRU(), admit=MinCount(1)), trained=[[2, 9]])
    saved(hashed, tmp_path / "a")
    fixed = make(None)
    before, own = rows_of(fixed), rows_of(hashed)
    checkpoint.load(tmp_path / "a", {"model": fixed, "tables": fixed.fused_optimizer})
    after = rows_of(fixed)
    assert after[2] == own[2] != before[2]
    assert all(after[id_] == before[id_] for id_ in set(range(12)) - {2, 9})


def test_ids_that_are_no_rows_are_refused_before_anything_changes(tmp_path):
    hashed = make(Hashed(max_rows=12), trained=[[2, 12, -1]])
    saved(hashed, tmp_path / "a")
    export_rows(tmp_path / "a", tmp_path / "t.parquet", "t")
    fixed = make(None)
    before = rows_of(fixed), fixed["ebc"].embedding_bags["u"].weight.clone()
    message = r"2 of 3 IDs of the hashed table .* 12: they must lie in \[0, 12\)"
    with pytest.raises(ValueError, match=message):
        checkpoint.load(tmp_path / "a", {"model": fixed, "tables": fixed.fused_optimizer})
    with pytest.raises(ValueError, match=message):
        import_rows(tmp_path / "t.parquet", fixed, "t")
    assert rows_of(fixed) == before[0]
    assert torch.equal(fixed["ebc"].embedding_bags["u"].weight, before[1])


def rows_array(num, dim, value, kind=np.float32):
    return pa.FixedSizeListArray.from_arrays(pa.array(np.full(num * dim, value, kind)), dim)


def table_of(ids, dim=6, kind=np.float32, value=0, **more):
    return pa.table({"id": pa.array(ids, pa.int64()), "row": rows_array(len(ids), dim, value, kind), **more})


@pytest.mark.parametrize(
    ("table", "options", "match"),
    [
        (table_of(range(4)), {}, "4 rows.*max_rows.*'ebc.embedding_bags.t'.*3"),
        (table_of([1, 2, 1]), {}, "3 rows.*2 distinct.*IDs"),
        (table_of([1, None]), {}, "'id'"),
        (table_of([1], dim=5), {}, r"'row'.*\[5\].*6 floats"),
        (table_of([1], kind=np.int32), {}, "6 floats"),
        (table_of([1]).drop_columns("row"), {}, "'row'"),
        (table_of([1, 8], value=np.nan), {}, "'row'.*ID 1"),
        (table_of([9], value=-np.inf), {}, "'row'.*ID 9"),
        (
            table_of([4], exp_avg=rows_array(1, 6, 0.0), exp_avg_sq=rows_array(1, 6, np.nan)),
            {"optimizer": True},
            "'exp_avg_sq'.*ID 4",
        ),
        (table_of([1]), {"optimizer": True}, "'exp_avg'.*optimizer=True"),
        (pa.table({"id": ["a"], "row": [[0.0]]}), {}, "'id'.*int64"),
    ],
)
def test_files_that_do_not_fit_are_refused_before_anything_changes(tmp_path, table, options, match):
    pq.write_table(table, tmp_path / "t.parquet")
    model = make(Hashed(max_rows=3), trained=[[7, 8]])
    before = rows_of(model)
    with pytest.raises(ValueError, match=match):
        import_rows(tmp_path / "t.parquet", model, "t", **options)
    assert rows_of(model) == before


@pytest.mark.parametrize("keys", [Hashed(max_rows=12), None])
def test_damaged_late_page_is_refused_before_anything_changes(tmp_path, keys):
    source = make(None, trained=[[3]])
    export_rows(saved(source, tmp_path / "a"), path := tmp_path / "t.parquet", "ebc.embedding_bags.t")
    content = bytearray(path.read_bytes())
    at = content.index(source["ebc"].embedding_bags["t"].weight[-1].detach().numpy().tobytes()[-4:])
    content[at] ^= 1
    path.write_bytes(content)
    model = make(keys, trained=[[7, 8]])
    before = rows_of(model)
    with pytest.raises((ValueError, checkpoint.CheckpointError), match=r"CRC"):
        import_rows(path, model, "t")
    assert rows_of(model) == before
    step(model["ebc"], [7])


@pytest.mark.parametrize("keys", [Hashed(max_rows=12), None])
def test_table_is_refused_after_file_fails_while_rows_are_replaced(tmp_path, keys, monkeypatch):
    pq.write_table(table_of([3, 4]), path := tmp_path / "t.parquet")
    model, blocks = make(keys, trained=[[7, 8]]), row_files._blocks
    saved(model, tmp_path / "a")
    reads = iter(range(9))

    def fail_on_second_read(file, columns):
        yield from blocks(file, columns)
        if next(reads) == 1:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(row_files, "_blocks", fail_on_second_read)
    with pytest.raises(checkpoint.CheckpointError, match="Input/output error"):
        import_rows(path, model, "t")
    for use in (lambda: step(model["ebc"], [7]), lambda: saved(copy.deepcopy(model), tmp_path / "b")):
        with pytest.raises(checkpoint.CheckpointError, match=r"t\.parquet.*Input/output error"):
            use()
    again = copy.deepcopy(model)
    import_rows(path, model, "t")
    checkpoint.load(tmp_path / "a", {"model": again, "tables": again.fused_optimizer})
    for finished in (model, again):
        step(finished["ebc"], [3])


def test_unknown_tables_and_existing_files_are_refused(tmp_path):
    model = make(Hashed(max_rows=3), trained=[[7]])
    saved(model, tmp_path / "a")
    (tmp_path / "t.parquet").touch()
    with pytest.raises(ValueError, match="another"):
        export_rows(tmp_path / "a", tmp_path / "t.parquet", "t")
    with pytest.raises(ValueError, match=r"'x'.*\['model.ebc.embedding_bags.t'"):
        export_rows(tmp_path / "a", tmp_path / "x.parquet", "x")
    with pytest.raises(ValueError, match=r"'x'.*\['ebc.embedding_bags.t'"):
        import_rows(tmp_path / "t.parquet", model, "x")


def sharded(folder):
    """Write a file on two ranks, and read it under other plans."""
    builders = {"rows": md.row_wise, "columns": lambda: md.column_wise(ranks=[1, 0])}
    found = {}
    for plan, builder in builders.items():
        for keys in (Hashed(max_rows=20), None):
            tables = torch.nn.ModuleDict({"ebc": EmbeddingBagCollection(_configs(keys))})
            plan_ = md.construct_module_sharding_plan(
                tables["ebc"], {"t": builder()}, world_size=default_env().shard.size, local_size=1
            )
            model = DistributedModelParallel(
                tables,
                default_env(),
                plan=md.ShardingPlan({"ebc": plan_}),
                sharders=[md.EmbeddingBagCollectionSharder(Adam(lr=0.1))],
                init_data_parallel=False,
            )
            import_rows(f"{folder}/t.parquet", model, "t", optimizer=True)
            name = f"{folder}/{plan}-{'fixed' if keys is None else 'hashed'}"
            checkpoint.save(name, {"model": model, "tables": model.fused_optimizer})
            found[name] = keys is None
    return found


def _configs(keys):
    rows = {"num_embeddings": 12} if keys is None else {"keys": keys}
    return [EmbeddingBagConfig(name="t", embedding_dim=6, feature_names=["f"], **rows)]


def test_files_are_read_under_any_plan(tmp_path, ranks):
    saved(make(Hashed(max_rows=20), trained=[range(12), [3, 4]]), tmp_path / "a")
    export_rows(tmp_path / "a", tmp_path / "t.parquet", "t", optimizer=True)
    expected = pq.read_table(tmp_path / "t.parquet").sort_by("id")
    for name in ranks(2).run(sharded, str(tmp_path))[0]:
        export_rows(name, f"{name}.parquet", "t", optimizer=True)
        assert pq.read_table(f"{name}.parquet").sort_by("id").equals(expected), name
