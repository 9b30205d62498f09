"""Plan under construction: the ranks of every piece, and the load per rank.

The step time is a sum over phases of the slowest rank's load. The search minimizes a smooth substitute: per
phase, the q-norm of the loads over ranks, scaled so that equal loads give the load itself. Unlike the
maximum, the norm improves if any rank gets faster. It tends to the maximum as q grows.

For array names such as ``load_RK``, see [Note: planner arrays] in ``problem.py``.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshrec.planner.problem import Problem, Scope
from meshrec.planner.types import Floats, Ints


class TablePlacement(NamedTuple):
    """Placement of a table: a candidate (way to split the table into pieces), and the ranks of the pieces.

    The arrays have an entry per piece. A piece that occupies a node has an entry for every rank in the node.

    Attributes:
        candidate: candidate index in the `Problem`.
        group_N: index of the piece group (group of equal pieces).
        rank_N: rank which holds the piece.
        amount_N: size of the piece relative to an even split; see `Problem.fixed_PK`.
    """

    candidate: int
    group_N: Ints
    rank_N: Ints
    amount_N: Floats


class Placed(NamedTuple):
    """Cheapest placement of a table, and the smooth objective in seconds of the plan with this placement."""

    objective: float
    placement: TablePlacement


class State:
    """Tables placed so far, and the resulting load and memory on every rank.

    Args:
        target_K: rough estimate for the slowest rank's final load per phase, in seconds. It makes the smooth
            objective weigh phases sensibly while most tables are not placed yet.

    Attributes:
        placements_T: placement per table; None until placed.
        load_RK: seconds per rank and phase, without common costs.
        bytes_R: bytes per rank, without common bytes.
        common: seconds which the placed tables cost every rank alike (`Problem.common_cost_C`).
        common_bytes: bytes which the placed tables take on every rank alike.
        work: touched array elements; unlike seconds, they do not depend on the machine.
    """

    def __init__(self, problem: Problem, target_K: Floats | None = None) -> None:
        self.problem = problem
        self.num_phases = problem.load_PK.shape[1]
        self.placements_T: list[TablePlacement | None] = [None] * len(problem.type_T)
        self.load_RK = np.zeros((problem.num_ranks, self.num_phases))
        self.bytes_R = np.zeros(problem.num_ranks)
        self.common = 0.0
        self.common_bytes = 0.0
        self.work = 0
        # q in the norm over ranks, until `set_exponent` changes it.
        self._exponent = 8
        # Floor for the scale, so that a phase without load does not divide by zero.
        self._least_K = 1e-3 * problem.load_PK.max(axis=0, initial=0) + 1e-30
        # Loads are scaled to about 1 before they are raised to the power q, which would overflow otherwise.
        self._scale_K = 1 / np.maximum(0.0 if target_K is None else target_K, self._least_K)
        # (load / scale) ** q, updated together with load_RK, so that a placement is priced without
        # recomputing all.
        self._power_RK = np.zeros_like(self.load_RK)

    @classmethod
    def of(cls, problem: Problem, placements_T: Sequence[TablePlacement]) -> "State":
        """Return the state of a complete plan."""
        state = cls(problem)
        for table, placement in enumerate(placements_T):
            state.add(table, placement)
        return state

    @property
    def seconds(self) -> float:
        """Step time without latencies: slowest rank summed over phases, plus the common part."""
        return float(self.common + self.load_RK.max(axis=0).sum())

    @property
    def plan(self) -> list[TablePlacement]:
        """Placements of the tables placed so far, in table order."""
        return [placement for placement in self.placements_T if placement is not None]

    def set_exponent(self, exponent: int) -> None:
        """Set the exponent q of the norm over ranks, which must be a power of two.

        Also set the scale, so that the present maximum load of every phase becomes 1. Call this method also
        after `load_RK` was assigned directly, because it recomputes all values that depend on the loads.
        """
        self._exponent = exponent
        self._scale_K = 1 / np.maximum(self.load_RK.max(axis=0), self._least_K)
        self._power_RK = self._power(self.load_RK)

    def weights(self) -> Floats:
        """Return the weight [K] of every phase, with which `cheapest_placement` compares ranks.

        The weight is the derivative of the smooth objective (the sum of norms in the module docstring) with
        respect to the phase's sum over ranks of ``(load * scale) ** q``.
        """
        sum_K = self._power_RK.sum(axis=0)
        weight_K: Floats = self._norm(sum_K) / np.maximum(sum_K, 1e-9) / self._exponent
        return weight_K

    def add(self, table: int, placement: TablePlacement) -> None:
        """Place a table that is not placed yet, and add its loads and bytes to the ranks."""
        assert self.placements_T[table] is None
        self.placements_T[table] = placement
        self.common += float(self.problem.common_cost_C[placement.candidate])
        self.common_bytes += float(self.problem.common_bytes_C[placement.candidate])
        self.load_RK[placement.rank_N] += self.loads(placement)
        self.bytes_R[placement.rank_N] += self.sizes(placement)
        # Only the powers of the ranks that changed are computed again.
        self._power_RK[placement.rank_N] = self._power(self.load_RK[placement.rank_N])

    def loads(self, placement: TablePlacement) -> Floats:
        """Return the seconds [N, K] per phase which every entry of the placement costs the entry's rank."""
        fixed_NK = self.problem.fixed_PK[placement.group_N]
        return fixed_NK + placement.amount_N[:, None] * (self.problem.load_PK[placement.group_N] - fixed_NK)

    def sizes(self, placement: TablePlacement) -> Floats:
        """Return the bytes [N] which every entry of the placement takes on the entry's rank."""
        fixed_N = self.problem.fixed_bytes_P[placement.group_N]
        return fixed_N + placement.amount_N * (self.problem.bytes_P[placement.group_N] - fixed_N)

    def fits(self) -> bool:
        """Return whether every rank is within the memory limit."""
        return bool(self.bytes_R.max() + self.common_bytes <= self.problem.memory_cap)

    def cheapest_placement(self, table: int, candidate: int, weight_K: Floats) -> Placed | None:
        """Find the ranks on which an even split of a table costs least, without changing this state.

        Piece groups are placed one after another, each on the cheapest ranks left by earlier groups.

        Args:
            table: table index.
            candidate: candidate index, which determines the split.
            weight_K: result of `weights`.

        Returns:
            The placement and the plan's objective with it, or None if memory or free ranks do not suffice.
        """
        problem = self.problem
        scope = problem.layouts_C[candidate].scope
        common_bytes = self.common_bytes + problem.common_bytes_C[candidate]
        # Free bytes per rank, if the table's common bytes are added everywhere.
        room_R = problem.memory_cap - common_bytes - self.bytes_R
        if room_R.min() < 0:
            return None
        allowed_R = problem.ranks_Y[problem.type_T[table]]
        change_K = np.zeros(self.num_phases)
        groups, ranks = [], []
        # Slots used by earlier groups: candidate pieces go to distinct slots.
        taken: Ints | None = None
        only: slice | None = None
        for group in range(*problem.pieces(candidate).indices(len(problem.candidate_P))):
            # The constant is the fixed cost of the numpy calls below, in array elements.
            self.work += 3000 + 3 * self.load_RK.size
            # Growth of every rank's powers, if it takes a piece.
            added_RK = self._power(self.load_RK + problem.load_PK[group]) - self._power_RK
            # First-order change of the objective, if the rank takes a piece.
            cost = added_RK @ weight_K
            cost[room_R < problem.bytes_P[group]] = np.inf
            if allowed_R is not None:
                cost[~allowed_R] = np.inf
            count = int(problem.count_P[group])
            if scope is Scope.NODES:
                cost = cost.reshape(-1, problem.node_size).sum(axis=1)
            elif scope is Scope.ONE_NODE:
                only = only or self._best_node(cost, problem.pieces(candidate))
                if only is None:
                    return None
                outside = np.ones(len(cost), bool)
                outside[only] = False
                cost[outside] = np.inf
            if taken is not None:
                cost[taken] = np.inf
            if count > len(cost):
                return None
            # A full sort would cost more, and the order of equal pieces does not matter.
            slots = np.argpartition(cost, count - 1)[:count] if count < len(cost) else np.arange(count)
            if not np.isfinite(cost[slots]).all():
                return None
            taken = slots if taken is None else np.concatenate((taken, slots))
            if scope is Scope.NODES:
                slots = (slots[:, None] * problem.node_size + np.arange(problem.node_size)).ravel()
            change_K += added_RK[slots].sum(axis=0)
            groups.append(np.full(len(slots), group))
            ranks.append(slots)
        norm_K = self._norm(self._power_RK.sum(axis=0) + change_K)
        objective = self.common + problem.common_cost_C[candidate] + norm_K.sum()
        group_N = np.concatenate(groups) if groups else np.zeros(0, np.int64)
        rank_N = np.concatenate(ranks) if ranks else np.zeros(0, np.int64)
        return Placed(float(objective), TablePlacement(candidate, group_N, rank_N, np.ones(len(rank_N))))

    def _best_node(self, cost_R: Floats, pieces: slice) -> slice | None:
        """Return the rank slice of the node where the pieces cost least; None if they fit on no node."""
        problem = self.problem
        # All pieces must be on distinct ranks of the node.
        needed = int(problem.count_P[pieces].sum())
        by_node = np.sort(cost_R.reshape(-1, problem.node_size), axis=1)
        if needed > problem.node_size:
            return None
        total = by_node[:, :needed].sum(axis=1)
        node = int(total.argmin())
        if not np.isfinite(total[node]):
            return None
        return slice(node * problem.node_size, (node + 1) * problem.node_size)

    def _norm(self, sum_K: Floats) -> Floats:
        """Return the q-norm of the loads over ranks, in seconds [K]."""
        mean_K = np.maximum(sum_K, 0.0) / self.problem.num_ranks
        norm_K: Floats = mean_K ** (1 / self._exponent) / self._scale_K
        return norm_K

    def _power(self, load_K: Floats) -> Floats:
        """Return ``(load * scale) ** q`` by repeated squaring, which is faster than numpy's power."""
        value: Floats = load_K * self._scale_K
        for _ in range(self._exponent.bit_length() - 1):
            value = value * value
        return value
