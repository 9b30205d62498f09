"""Find the fastest cut into stages, and a lower bound on the step time.

See [Note: units, stages, splits and lanes] in ``stages/__init__.py`` for the terms. Stage s takes f_s seconds
forward and b_s seconds backward per split. The link from a stage to the next stage, l, takes c_l seconds per
split and direction. A batch of K splits then takes::

    sum of f_s + sum of b_s + 2 * sum of c_l + (K - 1) * (max(f_s, c_l) + max(b_s, c_l))

The first split passes through all stages. Every other split leaves the slowest stage directly after the split
before it (Huang et al., "GPipe", 2019). The sums over f_s and over b_s are equal for all cuts, so cuts differ
only in the two maxima and in the link seconds.

A cut position is a set of units that can run before all other units: no unit in the set reads a value from
outside the set. It is stored as an int with bit u set for unit u. A cut into n stages is a growing sequence
of n positions, of which the last contains all units.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

MAX_CUTS = 2000
"""Maximum number of cut positions to search. The search visits all pairs of positions, and four million
pairs take seconds. A model with more positions is only cut between units that are neighbors in the unit
order.
"""


class UnitCost(NamedTuple):
    """Seconds which a unit (group of graph nodes) or a stage takes per split (microbatch)."""

    forward: float
    backward: float


@dataclass(frozen=True)
class StageChoice:
    """The cut and the number of splits (microbatches) selected by measurement.

    Times are in seconds per step. A cut assigns every unit, which is a group of graph nodes, to a stage.

    Attributes:
        stage_of: stage number for every unit.
        num_splits: splits per batch.
        seconds: predicted step time.
        bound: lower bound on the step time, over all cuts into the same number of stages and splits.
        predicted: predicted step time with the best cut, for every split count that was tried.
    """

    stage_of: list[int]
    num_splits: int
    seconds: float
    bound: float
    predicted: dict[int, float]

    @property
    def gap(self) -> float:
        """Predicted step time relative to the bound, minus 1. A gap of 0.1 means 10 % above the bound."""
        return self.seconds / self.bound - 1.0


class StageCut(NamedTuple):
    """A cut: an assignment of units (groups of graph nodes) to stages.

    Attributes:
        stage_of: stage number for every unit.
        seconds: predicted seconds per step.
        is_best: whether the search visited all possible cuts, which proves that this cut is the fastest.
    """

    stage_of: list[int]
    seconds: float
    is_best: bool


class _Prefix(NamedTuple):
    """The first stages of a cut, as the search extends it stage by stage.

    Attributes:
        forward: forward seconds per split (microbatch) of the slowest stage or link so far.
        backward: backward seconds per split of the slowest stage or link so far.
        links: sum of the link seconds per split and direction so far.
        positions: cut position at the end of every stage so far.
    """

    forward: float
    backward: float
    links: float
    positions: tuple[int, ...]


def best_cut(
    costs: Sequence[UnitCost],
    needs: Sequence[set[int]],
    num_stages: int,
    num_splits: int,
    links: Mapping[int, float] = MappingProxyType({}),
    *,
    shared: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> StageCut:
    """Return the cut into ``num_stages`` stages with the shortest predicted step time.

    A cut assigns every unit, which is a group of graph nodes, to a stage. Only cuts in which no unit reads a
    value from a later stage are considered.

    Args:
        costs: seconds per split for every unit, in an executable order.
        needs: for every unit, the numbers of the units from which it reads results.
        num_stages: stage count. Every stage gets at least one unit.
        links: seconds per split to send all values across a cut in one direction, by cut position. A cut
            position is an int with bit u set for every unit u before the cut. Missing positions take 0
            seconds.
        shared: for every parameter used by several units, the numbers of these units. They get the same
            stage.

    Raises:
        ValueError: there are more stages than units, or no cut puts all users of a shared parameter in one
            stage.
    """
    # Dynamic programming over positions. For every position, keep the prefixes which no other prefix beats in
    # the slowest forward stage, the slowest backward stage and the links.
    if num_stages > len(costs):
        raise ValueError(f"{len(costs)} units cannot make {num_stages} stages. Take fewer stages.")
    # Sorted by size: a stage's start precedes the stage's end, and the last position contains all units.
    positions, is_all = _positions_for_shared(needs, shared)
    # Summed over all units before a position. The cost of a stage is the difference of two positions.
    forward = {position: sum(costs[u].forward for u in _units(position)) for position in positions}
    backward = {position: sum(costs[u].backward for u in _units(position)) for position in positions}
    everything = positions[-1]
    # By the position at which the stages so far end.
    parts: dict[int, list[_Prefix]] = {0: [_Prefix(0.0, 0.0, 0.0, ())]}
    for stage in range(num_stages):
        # The last stage ends with all units.
        last = stage == num_stages - 1
        extended: dict[int, list[_Prefix]] = {}
        for before, prefixes in parts.items():
            for position in [everything] if last else positions:
                # A stage has at least one unit, and leaves at least one per later stage. The expression
                # ``before & ~position`` is 0 only if the position contains all units before it.
                if before & ~position or position == before or position == 0:
                    continue
                if position.bit_count() > len(costs) - (num_stages - 1 - stage):
                    continue
                # Nothing is sent after the last stage.
                link = 0.0 if last else links.get(position, 0.0)
                f, b = forward[position] - forward[before], backward[position] - backward[before]
                extended.setdefault(position, []).extend(
                    _Prefix(
                        max(p.forward, f, link),
                        max(p.backward, b, link),
                        p.links + link,
                        (*p.positions, position),
                    )
                    for p in prefixes
                )
        # A prefix that another prefix beats in all three numbers cannot become part of the fastest cut.
        parts = {position: _pareto_optimal(candidates) for position, candidates in extended.items()}
    if everything not in parts:
        raise ValueError(
            f"no cut into {num_stages} stages keeps all uses of a parameter in one stage; several units use "
            f"{', '.join(map(repr, shared))}. Take fewer stages."
        )
    # The part of the step time that is equal for all cuts.
    total = forward[everything] + backward[everything]

    def seconds(part: _Prefix) -> float:
        """Return the predicted seconds per step of a complete cut, by the formula in the module docstring."""
        return total + 2 * part.links + (num_splits - 1) * (part.forward + part.backward)

    best = min(parts[everything], key=seconds)
    # A unit is in the first stage at whose end the position contains it.
    stage_of = [
        next(s for s, position in enumerate(best.positions) if position >> u & 1) for u in range(len(costs))
    ]
    return StageCut(stage_of, seconds(best), is_all)


def max_stages(needs: Sequence[set[int]], shared: Mapping[str, Sequence[int]]) -> int:
    """Return the largest number of stages for which `best_cut` finds a cut.

    Args:
        needs: for every unit, the numbers of the units from which it reads results.
        shared: for every parameter used by several units, the numbers of these units.
    """
    # Longest chain of positions, as sets, that ends at a position. Positions are sorted by size, so all
    # subsets of a position precede it.
    most: dict[int, int] = {}
    for position in _positions_for_shared(needs, shared)[0]:
        most[position] = max(
            (1 + count for before, count in most.items() if not before & ~position), default=0
        )
    return max(most.values())


def bound(cut: StageCut, costs: Sequence[UnitCost], num_stages: int, num_splits: int) -> float:
    """Return a lower bound on the seconds per step over all cuts into ``num_stages`` stages.

    If the search proved ``cut`` to be the fastest, the bound is the predicted time of ``cut``. Otherwise, the
    bound assumes that all stages take equally long, but no less than the slowest unit.

    Args:
        cut: result of `best_cut` for the same arguments.
        costs: seconds per split (microbatch) for every unit.
        num_stages: stage count.
        num_splits: splits per batch.
    """
    # All cuts were visited, so no cut is faster.
    if cut.is_best:
        return cut.seconds

    def slowest(seconds: Sequence[float]) -> float:
        """Return a lower bound on the seconds of the slowest stage, from the seconds of every unit."""
        # The slowest stage takes at least the mean over stages, and at least as long as the slowest unit.
        return max(sum(seconds) / num_stages, max(seconds))

    forward, backward = [c.forward for c in costs], [c.backward for c in costs]
    return sum(forward) + sum(backward) + (num_splits - 1) * (slowest(forward) + slowest(backward))


def _pareto_optimal(parts: Sequence[_Prefix]) -> list[_Prefix]:
    """Return the prefixes which are worth extending.

    A prefix is dropped if another prefix is at least as fast in forward, backward and link seconds.
    """
    unbeaten: list[_Prefix] = []
    # Sorted by the slowest forward stage, so every earlier part is at least as good there.
    for part in sorted(parts):
        if not any(k.backward <= part.backward and k.links <= part.links for k in unbeaten):
            unbeaten.append(part)
    return unbeaten


def cut_positions(needs: Sequence[set[int]]) -> tuple[list[int], bool]:
    """Return the cut positions, smallest sets first, and whether the list is complete.

    A cut position is a set of units that can run before all other units, as an int with bit u set for unit u.
    For three units in a chain, the positions are 0b000, 0b001, 0b011 and 0b111. A graph may have more than
    `MAX_CUTS` positions. The list then has only the sets of the first n units, for every n, and the second
    result is False.

    Args:
        needs: for every unit, the numbers of the units from which it reads results.
    """
    masks = [sum(1 << n for n in unit_needs) for unit_needs in needs]
    # Graph search from the empty set: add any unit all of whose inputs are in the set.
    reached = {0}
    waiting = [0]
    while waiting:
        position = waiting.pop()
        for unit, mask in enumerate(masks):
            if not position >> unit & 1 and not mask & ~position:
                larger = position | 1 << unit
                if larger not in reached:
                    reached.add(larger)
                    waiting.append(larger)
        # The number of sets grows exponentially for models with parallel branches.
        if len(reached) > MAX_CUTS:
            return [(1 << length) - 1 for length in range(len(needs) + 1)], False
    return sorted(reached, key=lambda position: (position.bit_count(), position)), True


def _positions_for_shared(
    needs: Sequence[set[int]], shared: Mapping[str, Sequence[int]]
) -> tuple[list[int], bool]:
    """Return the cut positions which keep all units with a shared parameter on the same side of the cut.

    The second result is whether `cut_positions` returned all cut positions. See `best_cut` for the arguments.
    """
    positions, is_all = cut_positions(needs)
    for units in shared.values():
        # All units which use the parameter, as a bit mask.
        users = sum(1 << unit for unit in units)
        positions = [position for position in positions if position & users in (0, users)]
    return positions, is_all


def _units(position: int) -> Iterator[int]:
    """Yield the unit numbers in a cut position, which are the indices of the set bits."""
    while position:
        # The lowest set bit.
        lowest = position & -position
        yield lowest.bit_length() - 1
        position ^= lowest
