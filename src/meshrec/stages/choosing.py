"""Find the fastest cut into stages, and a lower bound on the step time.

If stage s takes f_s seconds forward and b_s seconds backward per split, and link l takes c_l seconds per
split and direction, a batch of K splits takes::

    sum of f_s + sum of b_s + 2 * sum of c_l + (K - 1) * (max(f_s, c_l) + max(b_s, c_l))

The first split passes through all stages. Every other split leaves the slowest stage directly after the split
before it (Huang et al., "GPipe", 2019). The sums over f_s and over b_s are equal for all cuts. Cuts differ
only in their slowest stages and their links.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

MAX_CUTS = 2000
"""Maximum cut position count. A model with more is only cut along the execution order: the search
visits all pairs of positions, and four million pairs take seconds.
"""


class UnitCost(NamedTuple):
    """Seconds per split in a unit (or stage)."""

    forward: float
    backward: float


@dataclass(frozen=True)
class StageChoice:
    """The selected cut and split count.

    Attributes:
        stage_of: stage per unit.
        num_splits: split count.
        seconds: predicted step time.
        bound: lower bound on the step time, for any cut into as many stages and splits.
        predicted: predicted step time with the best cut, by split count.
    """

    stage_of: list[int]
    num_splits: int
    seconds: float
    bound: float
    predicted: dict[int, float]

    @property
    def gap(self) -> float:
        """Predicted time relative to the bound, minus 1: 0.1 means 10 % above the bound."""
        return self.seconds / self.bound - 1.0


class StageCut(NamedTuple):
    """Assignment from units to stages.

    Attributes:
        stage_of: stage per unit.
        seconds: predicted step time.
        is_best: whether the search visited all cuts, so this cut is the fastest.
    """

    stage_of: list[int]
    seconds: float
    is_best: bool


class _Prefix(NamedTuple):
    """The first stages in a cut: slowest stage seconds per direction, link seconds, and positions."""

    forward: float
    backward: float
    links: float
    cuts: tuple[int, ...]


def best_cut(
    costs: Sequence[UnitCost],
    needs: Sequence[set[int]],
    num_stages: int,
    num_splits: int,
    links: Mapping[int, float] = MappingProxyType({}),
    *,
    shared: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> StageCut:
    """Return the fastest unit-to-stage assignment in which no unit needs a later stage.

    A cut position is the set of units before the cut, as bits in an int. These units need no unit outside the
    set.

    Args:
        costs: cost per unit, in an executable order.
        needs: per unit, the units whose results it reads.
        num_stages: stage count.
        num_splits: split count.
        links: link seconds by cut position; 0 for other positions.
        shared: units by shared parameter name; these units stay in the same stage.

    Raises:
        ValueError: there are more stages than units, or no cut keeps shared parameters in a single stage.
    """
    # Dynamic programming over positions. For every position, keep the prefixes which no other prefix beats in
    # the slowest forward stage, the slowest backward stage and the links.
    if num_stages > len(costs):
        raise ValueError(f"{len(costs)} units cannot make {num_stages} stages. Take fewer stages.")
    # Sorted by size: a stage's start precedes the stage's end, and the last position contains all units.
    positions, is_all = _positions_for_shared(needs, shared)
    forward = {position: sum(costs[u].forward for u in _units(position)) for position in positions}
    backward = {position: sum(costs[u].backward for u in _units(position)) for position in positions}
    everything = positions[-1]
    parts: dict[int, list[_Prefix]] = {0: [_Prefix(0.0, 0.0, 0.0, ())]}
    for stage in range(num_stages):
        last = stage == num_stages - 1
        extended: dict[int, list[_Prefix]] = {}
        for before, prefixes in parts.items():
            for position in [everything] if last else positions:
                # A stage has at least one unit, and leaves at least one per later stage.
                if before & ~position or position == before or position == 0:
                    continue
                if position.bit_count() > len(costs) - (num_stages - 1 - stage):
                    continue
                link = 0.0 if last else links.get(position, 0.0)
                f, b = forward[position] - forward[before], backward[position] - backward[before]
                extended.setdefault(position, []).extend(
                    _Prefix(
                        max(p.forward, f, link), max(p.backward, b, link), p.links + link, (*p.cuts, position)
                    )
                    for p in prefixes
                )
        parts = {position: _pareto_optimal(candidates) for position, candidates in extended.items()}
    if everything not in parts:
        raise ValueError(
            f"no cut into {num_stages} stages keeps all uses of a parameter in one stage; several units use "
            f"{', '.join(map(repr, shared))}. Take fewer stages."
        )
    total = forward[everything] + backward[everything]

    def seconds(part: _Prefix) -> float:
        return total + 2 * part.links + (num_splits - 1) * (part.forward + part.backward)

    best = min(parts[everything], key=seconds)
    stage_of = [
        next(s for s, position in enumerate(best.cuts) if position >> u & 1) for u in range(len(costs))
    ]
    return StageCut(stage_of, seconds(best), is_all)


def max_stages(needs: Sequence[set[int]], shared: Mapping[str, Sequence[int]]) -> int:
    """Return the maximum stage count for `best_cut`.

    Args:
        needs: see `best_cut`.
        shared: see `best_cut`.
    """
    most: dict[int, int] = {}
    for position in _positions_for_shared(needs, shared)[0]:
        most[position] = max(
            (1 + count for before, count in most.items() if not before & ~position), default=0
        )
    return max(most.values())


def bound(cut: StageCut, costs: Sequence[UnitCost], num_stages: int, num_splits: int) -> float:
    """Return a lower bound on the step seconds with any cut.

    Args:
        cut: `best_cut` result.
        costs: cost per unit.
        num_stages: stage count.
        num_splits: split count.
    """
    if cut.is_best:
        return cut.seconds

    def slowest(seconds: Sequence[float]) -> float:
        """Return a lower bound on the slowest stage's seconds, from the seconds per unit."""
        # The slowest stage takes at least the mean over stages, and at least as long as the slowest unit.
        return max(sum(seconds) / num_stages, max(seconds))

    forward, backward = [c.forward for c in costs], [c.backward for c in costs]
    return sum(forward) + sum(backward) + (num_splits - 1) * (slowest(forward) + slowest(backward))


def _pareto_optimal(parts: Sequence[_Prefix]) -> list[_Prefix]:
    unbeaten: list[_Prefix] = []
    # Sorted by the slowest forward stage, so every earlier part is at least as good there.
    for part in sorted(parts):
        if not any(k.backward <= part.backward and k.links <= part.links for k in unbeaten):
            unbeaten.append(part)
    return unbeaten


def cut_positions(needs: Sequence[set[int]]) -> tuple[list[int], bool]:
    """Return the cut positions, as bit masks for the units before the cut, and whether these are all.

    If there are more than `MAX_CUTS`, return only those along the unit order.
    """
    masks = [sum(1 << n for n in unit_needs) for unit_needs in needs]
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
        if len(reached) > MAX_CUTS:
            return [(1 << length) - 1 for length in range(len(needs) + 1)], False
    return sorted(reached, key=lambda position: (position.bit_count(), position)), True


def _positions_for_shared(
    needs: Sequence[set[int]], shared: Mapping[str, Sequence[int]]
) -> tuple[list[int], bool]:
    """Return the `cut_positions` which keep units with a shared parameter together, and the flag."""
    positions, is_all = cut_positions(needs)
    for units in shared.values():
        users = sum(1 << unit for unit in units)
        positions = [position for position in positions if position & users in (0, users)]
    return positions, is_all


def _units(position: int) -> Iterator[int]:
    while position:
        lowest = position & -position
        yield lowest.bit_length() - 1
        position ^= lowest
