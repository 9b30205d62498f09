import re

from meshrec.planner.diagnose import diagnose
from meshrec.planner.types import ParameterConstraints, Table, Topology

GIB = 1024**3
BIG = Table(name="big", num_embeddings=2**25, embedding_dim=64)  # 8 GiB
SMALL = Table(name="small", num_embeddings=1000, embedding_dim=64)


def words(tables, gib, constraints=None, **topology):
    machine = Topology(world_size=2, hbm_cap=int(gib * GIB), reserve=0.0, **topology)
    return diagnose(tables, machine, batch_size=8, constraints=constraints or {})


def test_more_ranks_or_half_precision():
    text = words([BIG, SMALL], 3)
    assert re.search(
        r"rank \d needs 4\.\d\d GiB and has 3.00 GiB .*: 1\.\d\d GiB are missing, and 2 of 2", text
    )
    assert "The largest tables with optimizer state: big 8.12 GiB, small " in text
    assert "fp16 weights for big" in text
    assert "4 ranks instead of 2" in text


def test_row_wise_is_enough_where_constraints_forbid_it():
    whole = {"big": ParameterConstraints(sharding_types=["table_wise"])}
    text = words([BIG, SMALL], 6, whole)
    assert "row-wise sharding on big" in text
    assert "ranks instead" not in text.split("one of: ")[1].split(";")[0]


def test_nothing_left_for_tables():
    assert "nothing is left for tables" in words([SMALL], 1, dense_bytes=2 * GIB)


def test_nothing_helps():
    whole = {"big": ParameterConstraints(sharding_types=["table_wise"], ranks=[0], min_partition=64)}
    text = words([BIG], 0.001, whole)
    assert "suffice: reduce the reserve, the batch size, or the tables" in text


def test_what_is_not_proven_is_not_claimed():
    """Three tables of 3 GiB on two ranks of 5 GiB, whole: their mean fits, no plan does."""
    tables = [Table(name=f"t{i}", num_embeddings=2**20 * 12, embedding_dim=64) for i in range(3)]
    whole = {table.name: ParameterConstraints(sharding_types=["table_wise"]) for table in tables}
    assert words(tables, 5, whole).startswith("no plan was found that fits into memory, although ")
    assert words(tables, 4, whole).startswith("no plan fits into memory.\n")
