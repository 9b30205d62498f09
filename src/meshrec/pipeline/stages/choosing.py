"""Choice of the best cut of a model into stages, with a bound on what any cut can reach.

With K equal splits, and stages that take f_s seconds forward and b_s backward per split over links that take
c, a batch takes

    sum of f + sum of b + 2 * sum of c + (K - 1) * (max(f, c) + max(b, c)):

The first split passes through all stages, and every other one leaves the slowest stage right after the one
before it (Huang et al., "GPipe", 2019). The sums of f and b are the same for every cut, so cuts differ only
in their slowest stages and their links.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

MOST_CUTS = 2000
"""Limit on the number of places to cut. Beyond it a model is cut only along the order in which it runs.

The search looks at all pairs of places, and four million pairs take seconds.
"""


class UnitCost(NamedTuple):
    """Seconds that a unit takes for one split."""

    forward: float
    backward: float


@dataclass(frozen=True)
class StageChoice:
    """The chosen cut and number of splits.

    Attributes:
        stage_of: the stage of each unit.
        num_splits: the number of splits.
        seconds: the predicted step.
        bound: a lower bound for every cut into this number of stages and splits.
        predicted: the best predicted step by number of splits.
    """

    stage_of: list[int]
    num_splits: int
    seconds: float
    bound: float
    predicted: dict[int, float]

    @property
    def gap(self) -> float:
        """Relative distance of the predicted step from the bound."""
        return self.seconds / self.bound - 1.0


class StageCut(NamedTuple):
    """An assignment of units to stages, and its seconds. ``is_best``: the search compared it with every other
    cut.
    """

    stage_of: list[int]
    seconds: float
    is_best: bool


class _Prefix(NamedTuple):
    """The cost of the first stages of a cut: of the slowest stage, and of all links; and where stages end."""

    forward: float
    backward: float
    links: float
    places: tuple[int, ...]


def best_cut(
    costs: Sequence[UnitCost],
    needs: Sequence[set[int]],
    num_stages: int,
    num_splits: int,
    links: Mapping[int, float] = MappingProxyType({}),
    *,
    shared: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> StageCut:
    """Return the fastest assignment of units to stages in which no unit needs a later stage.

    A place to cut is a set of units, as bits, that needs nothing outside it. Dynamic programming over places
    keeps, for each place, every choice that no other choice beats in slowest forward stage, slowest backward
    stage and links.

    Args:
        costs: costs of the units, in an order in which they can run.
        needs: for each unit the units whose results it reads.
        num_stages, num_splits: the numbers of stages n and of splits K.
        links: seconds of the link at each place; a missing place costs nothing.
        shared: names of parameters, each with the units that use it. They stay in one stage.

    Raises:
        ValueError: there are more stages than units, or than units that share no parameter.
    """
    if num_stages > len(costs):
        raise ValueError(f"{len(costs)} units cannot make {num_stages} stages. Take fewer stages.")
    places, is_all = _places_beside(needs, shared)
    forward = {place: sum(costs[u].forward for u in _units(place)) for place in places}
    backward = {place: sum(costs[u].backward for u in _units(place)) for place in places}
    everything = places[-1]
    parts: dict[int, list[_Prefix]] = {0: [_Prefix(0.0, 0.0, 0.0, ())]}
    for stage in range(num_stages):
        last = stage == num_stages - 1
        found: dict[int, list[_Prefix]] = {}
        for before, known in parts.items():
            for place in [everything] if last else places:
                # A stage has a unit at least, and leaves one for each stage after it.
                if before & ~place or place == before or place == 0:
                    continue
                if place.bit_count() > len(costs) - (num_stages - 1 - stage):
                    continue
                link = 0.0 if last else links.get(place, 0.0)
                f, b = forward[place] - forward[before], backward[place] - backward[before]
                found.setdefault(place, []).extend(
                    _Prefix(
                        max(p.forward, f, link), max(p.backward, b, link), p.links + link, (*p.places, place)
                    )
                    for p in known
                )
        parts = {place: _unbeaten(own) for place, own in found.items()}
    if everything not in parts:
        raise ValueError(
            f"no cut into {num_stages} stages keeps the uses of each parameter together; several units use "
            f"{', '.join(map(repr, shared))}. Take fewer stages."
        )
    total = forward[everything] + backward[everything]

    def seconds(part: _Prefix) -> float:
        return total + 2 * part.links + (num_splits - 1) * (part.forward + part.backward)

    best = min(parts[everything], key=seconds)
    stage_of = [next(s for s, place in enumerate(best.places) if place >> u & 1) for u in range(len(costs))]
    return StageCut(stage_of, seconds(best), is_all)


def most_stages(needs: Sequence[set[int]], shared: Mapping[str, Sequence[int]]) -> int:
    """Return the largest number of stages into which `best_cut` can cut the units."""
    most: dict[int, int] = {}
    for place in _places_beside(needs, shared)[0]:
        most[place] = max((1 + count for before, count in most.items() if not before & ~place), default=0)
    return max(most.values())


def bound(cut: StageCut, costs: Sequence[UnitCost], num_stages: int, num_splits: int) -> float:
    """Return a lower bound on the seconds of any cut.

    It is the time of ``cut`` from `best_cut` if that is the best of all. Otherwise the slowest stage takes at
    least its share of the work, and at least as long as the largest unit.
    """
    if cut.is_best:
        return cut.seconds

    def slowest(seconds: Sequence[float]) -> float:
        return max(sum(seconds) / num_stages, max(seconds))

    forward, backward = [c.forward for c in costs], [c.backward for c in costs]
    return sum(forward) + sum(backward) + (num_splits - 1) * (slowest(forward) + slowest(backward))


def _unbeaten(parts: Sequence[_Prefix]) -> list[_Prefix]:
    kept: list[_Prefix] = []
    for part in sorted(parts):
        if not any(k.backward <= part.backward and k.links <= part.links for k in kept):
            kept.append(part)
    return kept


def places_of(needs: Sequence[set[int]]) -> tuple[list[int], bool]:
    """Return the places to cut, as bit masks of the units before the cut, and whether these are all places.

    Beyond `MOST_CUTS` places, only those along the order of the units are returned.
    """
    masks = [sum(1 << n for n in own) for own in needs]
    found = {0}
    waiting = [0]
    while waiting:
        place = waiting.pop()
        for unit, mask in enumerate(masks):
            if not place >> unit & 1 and not mask & ~place:
                larger = place | 1 << unit
                if larger not in found:
                    found.add(larger)
                    waiting.append(larger)
        if len(found) > MOST_CUTS:
            return [(1 << length) - 1 for length in range(len(needs) + 1)], False
    return sorted(found, key=lambda place: (place.bit_count(), place)), True


def _places_beside(needs: Sequence[set[int]], shared: Mapping[str, Sequence[int]]) -> tuple[list[int], bool]:
    """Return those of `places_of` that do not separate units that share a parameter, and its flag."""
    places, is_all = places_of(needs)
    for units in shared.values():
        users = sum(1 << unit for unit in units)
        places = [place for place in places if place & users in (0, users)]
    return places, is_all


def _units(place: int) -> Iterator[int]:
    while place:
        lowest = place & -place
        yield lowest.bit_length() - 1
        place ^= lowest
