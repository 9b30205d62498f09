"""What a gradient does to the tables of a rank: a fused update in place, or an ordinary gradient."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

import meshrec.ops.tbe.naive  # noqa: F401 - the ops must exist
from meshrec.distributed.gradient_exchange import RowGradients
from meshrec.distributed.input_dist import LookupIds
from meshrec.distributed.lookup import LookupTables
from meshrec.distributed.mesh import Axis
from meshrec.distributed.routing import Rectangle, Routing
from meshrec.distributed.row_stats import ROW_WISE, ColumnPeers, Touched
from meshrec.ops.tbe.layout import NONE
from meshrec.ops.tbe.naive_update import Hyper


class FusedRule(Protocol):
    """An optimizer as the updates need it: one rule for all tables that share it."""

    @property
    def code(self) -> int:
        """Which formula."""

    @property
    def name(self) -> str:
        """What users call it."""

    def hyper(self, row_dim: int) -> Tensor:
        """The numbers of the present update, see ``OptimizerSpec.hyper``."""

    def advance(self) -> None:
        """Begins a new update."""


class _Group:
    """The rectangles of one rule that need no other rank, one call of ``tbe_update``."""

    def __init__(self, rectangles: list[int], state: Sequence[Sequence[Tensor]]) -> None:
        self.rectangles = rectangles
        self.state = slot_major([state[i] for i in rectangles])


def slot_major(state: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Slot 0 of all tables, then slot 1."""
    return [slot for slots in zip(*state, strict=True) for slot in slots]


class TableUpdates:
    """The fused rules of some tables; tables without a rule get ordinary gradients.

    ``rules``: for each table of the module its rule, None for ordinary gradients. ``state``: for each
    rectangle its optimizer state.
    """

    def __init__(
        self,
        tables: LookupTables,
        routing: Routing,
        axis: Axis,
        rules: Sequence[FusedRule | None],
        state: Sequence[Sequence[Tensor]],
    ) -> None:
        self._tables, self._axis = tables, axis
        self._rectangles = tables.work.rectangles
        self._state = state
        self._dims = [table.dim for table in routing.tables]
        split = _split_by_columns(routing)
        self._whole: list[tuple[FusedRule, _Group]] = []
        self._split: list[tuple[FusedRule, ColumnPeers, list[int]]] = []
        for rule in distinct(rules):
            of_rule = [t for t, other in enumerate(rules) if other is rule]
            peers = {t for t in of_rule if split[t] and rule.code in ROW_WISE and axis.size > 1}
            own = [i for i, rectangle in enumerate(self._rectangles) if rectangle.table in of_rule]
            whole = [i for i in own if self._rectangles[i].table not in peers]
            if whole:
                self._whole.append((rule, _Group(whole, state)))
            if peers:
                members = [i for i in own if self._rectangles[i].table in peers]
                self._split.append((rule, ColumnPeers(routing, axis, sorted(peers), rule.name), members))
        self._ordinary = [i for i, rectangle in enumerate(self._rectangles) if rules[rectangle.table] is None]

    def apply(self, grad: Tensor, ids: LookupIds) -> list[Tensor | None]:
        """Updates the fused tables; for each rectangle the gradient to give to autograd, None for the fused
        ones.

        Collective over the shard axis where rules need rows that are split by columns.
        """
        tables = self._tables
        grads: list[Tensor | None] = [None] * len(tables.weights)
        if not tables.is_empty:
            for rule, group in self._whole:
                tables.update(grad, ids, group.rectangles, group.state, rule.code, rule.hyper(0))
        for rule, peers, members in self._split:
            sparse = tables.sparse_grads(grad, ids, members) if members else []
            self._update_split(sparse, rule, peers, members)
        ordinary = [i for i in self._ordinary if tables.weights[i].requires_grad]
        if ordinary:
            for i, gradient in zip(ordinary, tables.dense_grads(grad, ids, ordinary), strict=True):
                grads[i] = gradient
        return grads

    def apply_rows(self, parts: Sequence[RowGradients]) -> list[Tensor | None]:
        """``apply`` from the gradients of rows, one part for each rectangle."""
        tables = self._tables
        grads: list[Tensor | None] = [None] * len(tables.weights)
        for rule, group in self._whole:
            hyper = rule.hyper(0)
            for i in group.rectangles:
                update_rows(tables.weights[i].detach(), self._state[i], *parts[i], rule.code, hyper)
        for rule, peers, members in self._split:
            self._update_split([parts[i] for i in members], rule, peers, members)
        for i in self._ordinary:
            weight = tables.weights[i]
            if weight.requires_grad:
                grads[i] = torch.zeros_like(weight).index_copy_(
                    0, parts[i].rows, parts[i].grads.to(weight.dtype)
                )
        return grads

    def _update_split(
        self, sparse: Sequence[RowGradients], rule: FusedRule, peers: ColumnPeers, members: list[int]
    ) -> None:
        hypers = [rule.hyper(self._dims[self._rectangles[i].table]) for i in members]
        touched = [self._touched(i, *pair) for i, pair in zip(members, sparse, strict=True)]
        stats = peers.row_stats(touched, rule.code, [Hyper.from_tensor(h) for h in hypers])
        for i, rows, hyper, sums in zip(members, touched, hypers, stats, strict=True):
            update_rows(self._tables.weights[i], self._state[i], rows.rows, rows.grad, rule.code, hyper, sums)

    def _touched(self, i: int, rows: Tensor, grad: Tensor) -> Touched:
        weight = self._tables.weights[i]
        return Touched(rows, grad, weight.detach()[rows].float(), [slot[rows] for slot in self._state[i]])


def update_rows(
    weight: Tensor,
    state: Sequence[Tensor],
    rows: Tensor,
    grad: Tensor,
    optimizer: int,
    hyper: Tensor,
    row_stats: Tensor | None = None,
) -> None:
    """Steps distinct rows [U] of one table from their gradients [U, D], in place."""
    torch.ops.meshrec.tbe_update(
        grad.reshape(-1),
        rows,
        torch.tensor([0, rows.numel()], device=rows.device),
        None,
        None,
        1,
        [0],
        [0],
        [NONE],
        True,
        [grad.shape[1]],
        [weight],
        list(state),
        optimizer,
        hyper,
        row_stats,
    )


def distinct(rules: Sequence[FusedRule | None]) -> list[FusedRule]:
    """Each rule once, in the order of tables."""
    found: list[FusedRule] = []
    for rule in rules:
        if rule is not None and all(rule is not other for other in found):
            found.append(rule)
    return found


def _split_by_columns(routing: Routing) -> list[bool]:
    """For each table whether its rows lie on several ranks: the same answer on all of them."""
    split = [False] * len(routing.tables)
    for work in routing.work:
        for rectangle in work.rectangles:
            split[rectangle.table] |= _width(rectangle) < routing.tables[rectangle.table].dim
    return split


def _width(rectangle: Rectangle) -> int:
    return rectangle.c1 - rectangle.c0
