import pytest
import torch

from meshrec.distributed import EmbeddingModuleShardingPlan, TableSize, row_wise
from meshrec.distributed.pieces import as_tensor, pieces_of, rank_spans
from meshrec.distributed.routing import RoutedTable, compile_plan
from meshrec.ops import operators
from meshrec.plan.builders import WorldShape

OPS = operators


def case():
    table = RoutedTable("t0", 10, 3, ("a",))
    plan = EmbeddingModuleShardingPlan({"t0": row_wise()("t0", TableSize(10, 3), WorldShape(2, 2))})
    routing = compile_plan([table], plan, num_ranks=2)
    bags = torch.tensor([0, 1, 3]), None, 1, [0]
    return routing, torch.tensor([1, 7, 2]), bags


def arguments(op):
    routing, values, (offsets, segments, num_keys, keys) = case()
    route = (values, offsets, None, segments, num_keys, keys, routing.router, 3, False, True, routing.names)
    payload, header, counts, _ = OPS.route_ids(*route)
    pieces = as_tensor(pieces_of([rank_spans(routing, 0), rank_spans(routing, 1)]))
    lookups = torch.tensor([[0, 0, 0, 3], [1, 0, 0, 3]])
    sequence = (values, offsets, segments, num_keys, keys, routing.router, lookups, counts, [3])
    words = int(header[0, 1])
    return {
        "route_ids": route,
        "unpack_ids": (payload[:words], header[:1], [0], 1, False, False),
        "gather_pooled": (torch.rand(12), None, pieces, [3, 3], 2, 3, offsets, segments, num_keys, keys),
        "gather_coded": (
            torch.zeros(2 * 2 * 11, dtype=torch.uint8),
            *(None, pieces, [3, 3], 2, 3, offsets, segments, num_keys, keys),
            *([0, 1, 2], [3, 3], [3, 3]),
        ),
        "scatter_pooled": (
            torch.rand(2, 3),
            pieces,
            [3, 3],
            0,
            offsets,
            segments,
            num_keys,
            keys,
            1.0,
            torch.float32,
        ),
        "gather_sequence": (torch.rand(9), *sequence),
        "scatter_sequence": (torch.rand(9), *sequence, 1.0, torch.float16),
        "gather_weight_grads": (torch.rand(3), *sequence[:6], counts),
    }[op]


@pytest.mark.parametrize(
    "op",
    [
        "route_ids",
        "unpack_ids",
        "gather_pooled",
        "gather_coded",
        "scatter_pooled",
        "gather_sequence",
        "scatter_sequence",
        "gather_weight_grads",
    ],
)
def test_opcheck(op):
    torch.library.opcheck(
        getattr(torch.ops.meshrec, op).default, arguments(op), test_utils=("test_schema", "test_faketensor")
    )
