from dataclasses import replace

import pytest
import torch

from meshrec.comms.wire import FORMATS, FULL_PRECISION
from meshrec.ops import operators
from meshrec.planner import Topology
from meshrec.planner.travel import packed_id_bytes
from meshrec.planner.types import Table
from meshrec.planner.wire_choice import (
    AUC_LOSS,
    WireBound,
    bytes_across_nodes,
    choose_wires,
)

TABLES = [
    Table(name="wide", num_embeddings=100_000, embedding_dim=64, pooling_factors=(1.0,)),
    Table(name="narrow", num_embeddings=100_000, embedding_dim=2, pooling_factors=(1.0,)),
]


def topology(**changes):
    return Topology(**{"world_size": 4, "local_world_size": 2, "compute_device": "cpu", **changes})


def chosen(bound, **changes):
    return [
        str(table.wire) for table in choose_wires(TABLES, topology(**changes), batch_size=1000, bound=bound)
    ]


def test_wide_rows_take_the_shortest_format_that_the_bound_allows():
    assert chosen(WireBound(auc_loss=None))[0] == "int4/int8"
    assert chosen(WireBound(auc_loss=0.0)) == ["fp32", "fp32"]
    assert chosen(WireBound(auc_loss=None, error=0.005))[0] != "int4/int8"
    assert chosen(WireBound(auc_loss=None, error=1e-3))[0] == "fp16"
    # A scale and a middle are longer than two values: narrow rows gain nothing.
    assert chosen(WireBound(auc_loss=None))[1] in ("fp16", "bf16")


def test_one_rank_sends_nothing():
    assert chosen(WireBound(auc_loss=None), world_size=1, local_world_size=1) == ["fp32", "fp32"]


def test_every_pair_can_be_sent():
    assert next(iter(AUC_LOSS)) == FULL_PRECISION
    for wires in AUC_LOSS:
        assert wires.validated().forward.name in FORMATS


def test_a_bound_is_at_least_0():
    with pytest.raises(ValueError, match=r"error.*-1"):
        WireBound(error=-1.0)


@pytest.mark.parametrize(
    ("num_rows", "num_ids"), [(1_000_000, 8_000), (50_000, 8_000), (10_000, 9_000), (64, 64)]
)
def test_the_bytes_of_packed_ids_are_predicted(num_rows, num_ids):
    parts = 4
    ids = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))[:num_ids].sort().values
    bounds = torch.arange(parts + 1) * num_rows // parts
    counts = torch.searchsorted(ids, bounds).diff().tolist()
    ids -= bounds[:-1].repeat_interleave(torch.tensor(counts))
    message, _ = operators.pack_ids(ids, counts)
    predicted = packed_id_bytes(num_rows / parts, num_ids / parts)
    assert len(message) / num_ids == pytest.approx(predicted, rel=0.1)
    assert predicted < 4


def test_distinct_rows_are_fewer_where_ids_are_hot():
    long = [replace(table, pooling_factors=(20.0,)) for table in TABLES]
    hot = [replace(table, effective_rows=100.0) for table in long]
    for tables, best in ((long, "sums"), (hot, "rows")):
        found = bytes_across_nodes(tables, topology(), batch_size=1000)
        assert min(found, key=found.__getitem__) == best
