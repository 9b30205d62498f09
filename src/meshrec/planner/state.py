"""A plan under construction: the place of every piece, and the load of every rank.

The search minimises a smooth substitute for the sum of slowest ranks: per phase the q-norm over ranks, scaled
so that equal loads give the load itself. It depends on every rank, where the maximum depends only on the
slowest, and tends to the maximum as q grows.
"""

from typing import NamedTuple

import numpy as np

from meshrec.planner.problem import Problem, Scope
from meshrec.planner.types import Floats, Ints


class Parts(NamedTuple):
    """The pieces of one table, with an entry for each rank that holds one."""

    candidate: int
    group_N: Ints
    """The group of equal pieces that each piece belongs to."""
    rank_N: Ints
    amount_N: Floats
    """Size relative to the even split; see `Problem.fixed_PK`."""


class Placed(NamedTuple):
    """The best places of a candidate, and the smooth objective with them."""

    objective: float
    parts: Parts


class State:
    """Loads per rank and phase of the tables placed so far.

    `target_K`: rough estimate of the slowest rank's load in each phase, to begin with.

    Attributes:
        parts_T: the pieces of each table; None before it is placed.
        load_RK, bytes_R: seconds and bytes on each rank, without what all ranks share.
        common, common_bytes: seconds and bytes that every rank has in addition.
        work: array elements that were touched, a measure of effort that does not depend on the machine.
    """

    def __init__(self, problem: Problem, target_K: Floats | None = None) -> None:
        self.problem = problem
        self.num_phases = problem.load_PK.shape[1]
        self.parts_T: list[Parts | None] = [None] * len(problem.type_T)
        self.load_RK = np.zeros((problem.num_ranks, self.num_phases))
        self.bytes_R = np.zeros(problem.num_ranks)
        self.common = 0.0
        self.common_bytes = 0.0
        self.work = 0
        self._exponent = 8
        self._least_K = 1e-3 * problem.load_PK.max(axis=0, initial=0) + 1e-30
        self._scale_K = 1 / np.maximum(0.0 if target_K is None else target_K, self._least_K)
        self._power_RK = np.zeros_like(self.load_RK)

    @property
    def seconds(self) -> float:
        """Seconds of a step without latencies: the sum over phases of the slowest rank, and the common
        part.
        """
        return float(self.common + self.load_RK.max(axis=0).sum())

    @property
    def plan(self) -> list[Parts]:
        """The pieces of the tables that are placed."""
        return [parts for parts in self.parts_T if parts is not None]

    def set_exponent(self, exponent: int) -> None:
        """Set q, a power of two, after loads were set. The present maximum of each phase counts as 1."""
        self._exponent = exponent
        self._scale_K = 1 / np.maximum(self.load_RK.max(axis=0), self._least_K)
        self._power_RK = self._power(self.load_RK)

    def weights(self) -> Floats:
        """Return the derivative of the smooth objective with respect to each phase's sum of powers."""
        sum_K = self._power_RK.sum(axis=0)
        weight_K: Floats = self._norm(sum_K) / np.maximum(sum_K, 1e-9) / self._exponent
        return weight_K

    def add(self, table: int, parts: Parts) -> None:
        """Place a table."""
        assert self.parts_T[table] is None
        self.parts_T[table] = parts
        self.common += float(self.problem.common_C[parts.candidate])
        self.common_bytes += float(self.problem.common_bytes_C[parts.candidate])
        self.load_RK[parts.rank_N] += self.loads(parts)
        self.bytes_R[parts.rank_N] += self.sizes(parts)
        self._power_RK[parts.rank_N] = self._power(self.load_RK[parts.rank_N])

    def loads(self, parts: Parts) -> Floats:
        """Return the seconds [N, K] of each piece."""
        fixed_NK = self.problem.fixed_PK[parts.group_N]
        return fixed_NK + parts.amount_N[:, None] * (self.problem.load_PK[parts.group_N] - fixed_NK)

    def sizes(self, parts: Parts) -> Floats:
        """Return the bytes [N] of each piece."""
        fixed_N = self.problem.fixed_bytes_P[parts.group_N]
        return fixed_N + parts.amount_N * (self.problem.bytes_P[parts.group_N] - fixed_N)

    def fits(self) -> bool:
        """Return whether every rank stays within its memory."""
        return bool(self.bytes_R.max() + self.common_bytes <= self.problem.memory_cap)

    def best_place(self, table: int, candidate: int, weight_K: Floats) -> Placed | None:
        """Return the best places for a candidate's even pieces, one group after the other; None if memory is
        short.
        """
        problem = self.problem
        scope = problem.layouts_C[candidate].scope
        common_bytes = self.common_bytes + problem.common_bytes_C[candidate]
        room_R = problem.memory_cap - common_bytes - self.bytes_R
        if room_R.min() < 0:
            return None
        allowed_R = problem.ranks_Y[problem.type_T[table]]
        change_K = np.zeros(self.num_phases)
        groups, ranks = [], []
        taken: Ints | None = None
        only: slice | None = None
        for group in range(*problem.pieces(candidate).indices(len(problem.candidate_P))):
            self.work += 3000 + 3 * self.load_RK.size
            added_RK = self._power(self.load_RK + problem.load_PK[group]) - self._power_RK
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
            places = np.argpartition(cost, count - 1)[:count] if count < len(cost) else np.arange(count)
            if not np.isfinite(cost[places]).all():
                return None
            taken = places if taken is None else np.concatenate((taken, places))
            if scope is Scope.NODES:
                places = (places[:, None] * problem.node_size + np.arange(problem.node_size)).ravel()
            change_K += added_RK[places].sum(axis=0)
            groups.append(np.full(len(places), group))
            ranks.append(places)
        norm_K = self._norm(self._power_RK.sum(axis=0) + change_K)
        objective = self.common + problem.common_C[candidate] + norm_K.sum()
        group_N = np.concatenate(groups) if groups else np.zeros(0, np.int64)
        rank_N = np.concatenate(ranks) if ranks else np.zeros(0, np.int64)
        return Placed(float(objective), Parts(candidate, group_N, rank_N, np.ones(len(rank_N))))

    def _best_node(self, cost_R: Floats, pieces: slice) -> slice | None:
        problem = self.problem
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
        mean_K = np.maximum(sum_K, 0.0) / self.problem.num_ranks
        norm_K: Floats = mean_K ** (1 / self._exponent) / self._scale_K
        return norm_K

    def _power(self, load_K: Floats) -> Floats:
        value: Floats = load_K * self._scale_K
        for _ in range(self._exponent.bit_length() - 1):
            value = value * value
        return value
