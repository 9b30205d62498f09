"""Select the wire formats in which ranks exchange embeddings and gradients, under an error or AUC bound.

A short format such as int8 saves network time, and costs two passes over the rows to encode and decode. The
cost model knows both, so each table gets the allowed format pair with the shortest exchange. The
selection happens before the plan is searched, on whole tables. That is sufficient, because the cost of a
shard's exchange is proportional to rows and columns, except for a few bytes of scale per row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from meshrec.comms.wire import BF16, FORMATS, FP16, FP32, INT4, INT8, AcrossNodes, TableWires, WireFormats
from meshrec.planner.estimators import PHASES, CostModel, Rectangles
from meshrec.planner.plan_file import PlannedShardingPlan
from meshrec.planner.types import Table, Topology

AUTO = "auto"
"""Value to request automatic selection in recipes and on the command line."""
# Phases whose duration depends on the wire formats.
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
"""Upper estimate of the absolute AUC loss, per format pair (embeddings, gradients).

From docs/guides/fewer-bytes.md.
"""


@dataclass(frozen=True, kw_only=True)
class WireBound:
    """Accuracy limits on the wire formats selected by `choose_wires`.

    Attributes:
        auc_loss: maximum AUC loss, as estimated in ``AUC_LOSS``; None: no limit.
        error: maximum rounding error of a value, relative to the largest value in the row; None: no limit.
    """

    auc_loss: float | None = 5e-4
    error: float | None = None

    def __post_init__(self) -> None:
        for name in ("auc_loss", "error"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name} of a wire bound is {value}; it must be at least 0.")

    def allows(self, wires: WireFormats) -> bool:
        """Return whether a format pair, which must be a key of ``AUC_LOSS``, satisfies both limits."""
        # Maximum rounding errors for rows whose largest value is 1.
        errors = [format.error_bound(1.0) for format in wires]
        within = self.error is None or max(errors) <= self.error
        return within and (self.auc_loss is None or AUC_LOSS[wires] <= self.auc_loss)


def choose_wires(
    tables: Sequence[Table], topology: Topology, *, batch_size: int, bound: WireBound, replicas: int = 1
) -> list[Table]:
    """Select for each table the wire formats with the shortest exchange within the bound.

    Among equally fast format pairs, the first in ``AUC_LOSS`` is used.

    Args:
        tables: tables; their present wire formats are ignored.

    Returns:
        Copies of the tables with the selected formats.
    """
    # Never empty: the first pair, fp32 for both, has no loss and no error.
    pairs = [wires for wires in AUC_LOSS if bound.allows(wires)]
    number = np.arange(len(tables))
    seconds = []
    for wires in pairs:
        # Formats of one table do not affect the exchange of another, so all tables are priced at once.
        priced = [replace(table, wire=wires) for table in tables]
        model = CostModel(priced, topology, batch_size=batch_size, replicas=replicas)
        a = model.arrays
        whole = Rectangles(
            number, a.rows_T.astype(np.float64), a.columns_T.astype(np.float64), np.zeros(len(tables), bool)
        )
        loads = model.rectangle_loads(whole)
        seconds.append(loads[:, _EXCHANGES].sum(1))
    is_single_rank = topology.world_size == replicas
    # A single rank sends nothing, so only passes which do not happen would decide: take the first pair.
    best = np.zeros(len(tables), np.int64) if is_single_rank else np.argmin(np.stack(seconds), 0)
    return [replace(table, wire=pairs[choice]) for table, choice in zip(tables, best.tolist(), strict=True)]


def wires_of(plan: PlannedShardingPlan) -> TableWires:
    """Return all tables' wire formats in a plan, in the form that sharders take.

    Raises:
        ValueError: the plan has no inputs.
    """
    return TableWires.from_tables({table.name: table.wire for table in plan.required_inputs().tables})


def bytes_across_nodes(
    tables: Sequence[Table], topology: Topology, *, batch_size: int, packed_ids: bool = False
) -> dict[str, float]:
    """Return the bytes which leave a node per step, by setting of the sharders' option ``across_nodes``.

    Tables are assumed to be row-wise over all ranks. With ``"sums"``, nodes send all IDs, and a row per bag
    and node as embedding and again as gradient. With ``"rows"``, nodes send distinct IDs, and a row per
    distinct ID as embedding and again as gradient.

    Args:
        topology: machine with several nodes; its own ``across_nodes`` is ignored.
        packed_ids: whether the run packs sorted IDs, as its log says (``distributed/id_exchange.py``). They
            are priced as if they were spread evenly over the table. Hot IDs which are close together take
            fewer bytes.
    """
    by_setting = {}
    for name in get_args(AcrossNodes):
        # IDs are packed only if nodes exchange rows.
        variant = replace(topology, across_nodes=name, packed_ids=packed_ids and name == "rows")
        model = CostModel(tables, variant, batch_size=batch_size)
        # Every table is assumed to be split by rows over all ranks.
        table = np.arange(len(tables)).repeat(model.num_ranks)
        rows = model.arrays.rows_T[table] / model.num_ranks
        columns = model.arrays.columns_T[table].astype(np.float64)
        sent = model.sent_bytes(Rectangles(table, rows, columns, np.full(len(table), model.sum_in_node)))
        by_setting[name] = (
            sum(float(sent_part.across_N.sum()) for sent_part in sent.values()) / model.num_nodes
        )
    return by_setting
