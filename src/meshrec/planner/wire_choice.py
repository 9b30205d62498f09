"""The choice of wire formats under a bound of error or of AUC.

A format saves time on the network and costs two passes over the rows at both ends. Both are in the cost
model, so each table gets the pair of formats with the shortest exchange among those that the bound allows.
The choice is made before the search, on whole tables: a rectangle's exchange is in proportion to its rows
and columns, but for the few bytes of each row's scale.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from meshrec.comms.wire import (
    BF16,
    FORMATS,
    FP16,
    FP32,
    INT4,
    INT8,
    AcrossNodes,
    TableWires,
    WireFormat,
    WireFormats,
)
from meshrec.planner.estimators import PHASES, CostModel
from meshrec.planner.plan_file import PlannedShardingPlan
from meshrec.planner.types import Table, Topology

AUTO = "auto"
"""The name of the choice in recipes and on the command line."""
_EXCHANGES = [PHASES.index("output"), PHASES.index("gradient")]
AUC_LOSS: dict[WireFormats, float] = {
    WireFormats(FP32, FP32): 0.0,
    WireFormats(BF16, BF16): 1e-4,
    WireFormats(FP16, FP16): 1e-4,
    WireFormats(INT8, BF16): 3e-4,
    WireFormats(INT8, INT8): 5e-4,
    WireFormats(FORMATS["int8+stochastic"], FORMATS["int8+stochastic+feedback"]): 5e-4,
    WireFormats(INT4, INT8): 2e-3,
}
"""The AUC that each pair of formats may cost, estimated from above after docs/guides/fewer-bytes.md."""


@dataclass(frozen=True, kw_only=True)
class WireBound:
    """The largest cost of the choice.

    Attributes:
        auc_loss: the largest loss of AUC, by ``AUC_LOSS``; None: no limit.
        error: the largest error of a value over the largest value of its row; None: no limit.
    """

    auc_loss: float | None = 5e-4
    error: float | None = None

    def __post_init__(self) -> None:
        for name in ("auc_loss", "error"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name} of a wire bound is {value}; it must be at least 0.")

    def allows(self, wires: WireFormats) -> bool:
        """Return whether a pair of formats keeps the bound."""
        errors = [_relative_error(format) for format in wires]
        within = self.error is None or max(errors) <= self.error
        return within and (self.auc_loss is None or AUC_LOSS[wires] <= self.auc_loss)


def choose_wires(
    tables: Sequence[Table], topology: Topology, *, batch_size: int, bound: WireBound, replicas: int = 1
) -> list[Table]:
    """Return the tables, each with the formats whose exchange is shortest within the bound.

    Of equally fast pairs, the first of ``AUC_LOSS`` is taken.
    """
    pairs = [wires for wires in AUC_LOSS if bound.allows(wires)]
    number = np.arange(len(tables))
    seconds = []
    for wires in pairs:
        priced = [replace(table, wire=wires) for table in tables]
        model = CostModel(priced, topology, batch_size=batch_size, replicas=replicas)
        loads = model.rectangle_loads(
            number, model.arrays.rows_T, model.arrays.columns_T, np.zeros(len(tables), bool)
        )
        seconds.append(loads[:, _EXCHANGES].sum(1))
    alone = topology.world_size == replicas
    best = np.zeros(len(tables), np.int64) if alone else np.argmin(np.stack(seconds), 0)
    return [replace(table, wire=pairs[choice]) for table, choice in zip(tables, best.tolist(), strict=True)]


def wires_of(plan: PlannedShardingPlan) -> TableWires:
    """Return the wire formats that a plan was made for."""
    return TableWires.of_each({table.name: table.wire for table in plan.required_inputs().tables})


def bytes_across_nodes(
    tables: Sequence[Table], topology: Topology, *, batch_size: int, packed_ids: bool = False
) -> dict[str, float]:
    """Return the bytes that leave a node in a step under each value of the sharders' ``across_nodes``.

    The tables are taken to be split by rows over all ranks. ``"sums"``: all IDs, and a row for each bag and
    node, both ways. ``"rows"``: the distinct rows of a node with their IDs, both ways. ``packed_ids``:
    whether the run packs sorted IDs, as its log says (``distributed/id_exchange.py``). Packed IDs are priced
    as if they were spread evenly over the table; hot IDs that lie together take fewer bytes.
    """
    found = {}
    for name in get_args(AcrossNodes):
        chosen = replace(topology, across_nodes=name, packed_ids=packed_ids and name == "rows")
        model = CostModel(tables, chosen, batch_size=batch_size)
        table = np.arange(len(tables)).repeat(model.num_ranks)
        rows, columns = model.arrays.rows_T[table] / model.num_ranks, model.arrays.columns_T[table]
        sent = model.sent_bytes(table, rows, columns, np.full(len(table), model.sum_in_node))
        found[name] = sum(float(each.across_N.sum()) for each in sent.values()) / model.num_nodes
    return found


def _relative_error(format: WireFormat) -> float:
    return format.error_bound(1.0)
