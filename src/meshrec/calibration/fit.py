"""Fit of a machine's figures to the measured phases of some steps.

Every phase of the cost model is a sum over the figures of a profile (seconds, or one over a bandwidth), each
times an amount that only the plan decides. The model itself gives the amounts: it is evaluated on machines
where all figures but one are zero. The fitted figures are those whose sums come closest to the measurements.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshrec.calibration.trials import Trial
from meshrec.planner.estimators import PHASES
from meshrec.planner.evaluate import evaluate
from meshrec.planner.hardware import HardwareProfile, Link
from meshrec.planner.types import Floats, Topology

_SECONDS = (
    "read_row_seconds",
    "update_row_seconds",
    "update_id_seconds",
    "route_id_seconds",
    "split_id_seconds",
    "scan_id_seconds",
    "scan_bag_seconds",
    "statistics_seconds",
    "kernel_seconds",
)
_BANDWIDTHS = ("read_bandwidth", "update_bandwidth", "stream_bandwidth")
_LINK = ("latency", "all_to_all", "reduce_scatter")  # times what was measured of the links alone
_LEAST = 1e-30  # seconds; not 0, for what takes no time does not happen
_NOTHING = 1e-20  # what such seconds add up to stays below, what a trial uses of a figure above
_LEAST_SHARE = 0.01
_LEAST_OF_LINK = 0.1
_FITS, _SWEEPS = 20, 300


def fit(
    known: HardwareProfile,
    trials: Sequence[Trial],
    measured: Sequence[Mapping[str, float]],
    topology: Topology,
) -> HardwareProfile:
    """Return `known` with the figures that best explain the seconds by phase `measured` for the trials.

    Its links are corrected by a factor for each kind of collective, if there are several ranks. Its
    description of the device and its figure for the sum of dense gradients stay. `topology` is that of the
    trials.

    A figure that the trials do not determine (less than a hundredth of every phase, or a link ten times as
    fast as it is alone) also stays, or is reduced to what a whole measured phase allows; the others are
    fitted around it. `sources` of the result names exactly these figures.

    Raises:
        ValueError: the trials determine no figure.
    """
    names = [*_SECONDS, *_BANDWIDTHS, *(_LINK if topology.world_size > 1 else ())]
    amounts = np.stack([_seconds(_machine_of(known, name), trials, topology) for name in names], axis=-1)
    amounts[amounts < _NOTHING] = 0.0
    seconds = np.array([[times.get(phase, 0.0) for phase in PHASES] for times in measured])
    some = (seconds > 0) & amounts.any(axis=-1)
    share = np.broadcast_to(seconds / np.maximum(seconds.sum(axis=1, keepdims=True), _LEAST), seconds.shape)
    before = np.array([_cost_of(known, name) for name in names])
    least = np.array([_LEAST_OF_LINK if name in _LINK else 0.0 for name in names])
    used = amounts[some]
    most = np.divide(seconds[some][:, None], used, where=used > 0, out=np.full_like(used, np.inf))
    kept = np.minimum(before, most.min(axis=0, initial=np.inf))
    values, dropped = _determined(used, seconds[some], share[some], kept, least)
    if len(dropped) == len(names):
        raise ValueError(
            f"the {len(trials)} trials determine none of the figures {names}: measured were the seconds "
            f"{list(map(dict, measured))}; a profile takes at least one. Run again on a machine that does "
            "nothing else, and without --quick."
        )
    found = dict(zip(names, values.tolist(), strict=True))
    link = {name: found.pop(name, 1.0) for name in _LINK}
    rates = {name: 1 / found.pop(name) for name in _BANDWIDTHS}
    figures: dict[str, Any] = found | rates
    sources = {
        names[i]: _why_kept(known, names[i], gave, kept[i] / before[i] if before[i] else 1.0)
        for i, gave in sorted(dropped.items())
    }
    intra, inter = _corrected(known.intra, link), _corrected(known.inter, link)
    return replace(known, intra=intra, inter=inter, sources=sources, **figures)


def _why_kept(known: HardwareProfile, name: str, gave: float | None, part: float) -> str:
    """Explain why a figure was kept. `gave`: value that the trials suggest, if any; `part`: share of the
    known time kept.
    """
    kept = "what was measured of the link alone"
    if name not in _LINK:
        kept = f"{getattr(known, name):.4g} of the built-in profile {known.name!r}"
    if part < 1:
        kept += f", cut to {part:.2g} times the time: a whole phase took no more"
    if gave is None:
        why, again = "no phase measured uses it", "under torchrun, on all ranks"
    else:
        unit = "times what the link takes alone" if name in _LINK else "s"
        unit = "s per byte" if name in _BANDWIDTHS else unit
        why = f"the measured phases fit best with {gave:.2g} {unit}, next to nothing in all of them"
        again = "on a machine that does nothing else, and without --quick"
    return f"not determined: {why}; kept is {kept}. Run again {again}."


def _cost_of(known: HardwareProfile, name: str) -> float:
    """Return the quantity that `fit` looks for: seconds, seconds per byte, or the factor of a link."""
    if name in _LINK:
        return 1.0
    figure: float = getattr(known, name)
    return 1 / figure if name in _BANDWIDTHS else figure


def _corrected(link: Link, factors: Mapping[str, float]) -> Link:
    return replace(
        link,
        latency=link.latency * factors["latency"],
        all_to_all=link.all_to_all / factors["all_to_all"],
        reduce_scatter=link.reduce_scatter / factors["reduce_scatter"],
    )


def _machine_of(known: HardwareProfile, name: str) -> HardwareProfile:
    """Return a machine on which only the figure `name` takes time. Dense gradients are never summed on it."""
    none = Link(latency=0.0, all_to_all=np.inf, reduce_scatter=np.inf, all_reduce=_LEAST)
    figures: dict[str, Any] = dict.fromkeys(_SECONDS, _LEAST) | dict.fromkeys(_BANDWIDTHS, np.inf)
    figures |= {"intra": none, "inter": none}
    if name in _LINK:
        for each in ("intra", "inter"):
            figures[each] = replace(none, **{name: getattr(getattr(known, each), name)})
    else:
        figures[name] = 1.0
    return replace(known, **figures)


def _seconds(machine: HardwareProfile, trials: Sequence[Trial], topology: Topology) -> Floats:
    """Return the seconds [trials, phases] on a machine."""
    topology = replace(topology, hardware=machine)
    return np.stack(
        [
            evaluate(
                {"": trial.plan(topology.world_size)}, trial.tables(), topology, batch_size=trial.batch_size
            ).phase_seconds_F
            for trial in trials
        ]
    )


def _determined(
    amounts: Floats, seconds: Floats, share: Floats, before: Floats, least: Floats
) -> tuple[Floats, dict[int, float | None]]:
    """Return the result of `_closest`, with the values `before` [X] for figures that the measurement does not
    determine.

    These are returned with the value that the fit would have given, or None if nothing was measured. They are
    removed one at a time, the one with the smallest part first, because its removal may determine another.
    """
    dropped: dict[int, float | None] = dict.fromkeys(np.flatnonzero(~amounts.any(axis=0)).tolist())
    while True:
        free = np.array([i for i in range(len(before)) if i not in dropped], np.int64)
        values = before.copy()
        rest = amounts @ np.where(np.isin(np.arange(len(before)), free), 0.0, before)
        values[free] = _closest(amounts[:, free], seconds, share, rest)
        parts = (amounts * values / seconds[:, None]).max(axis=0, initial=0.0)
        unclear = [i for i in free.tolist() if parts[i] < _LEAST_SHARE or values[i] < least[i]]
        if not unclear:
            return values, dropped
        worst = min(unclear, key=lambda i: parts[i])
        dropped[worst] = float(values[worst])


def _closest(amounts: Floats, seconds: Floats, share: Floats, rest: Floats) -> Floats:
    """Return non-negative factors of `amounts` [N, X] whose sum with `rest` [N] comes closest to `seconds`
    [N].

    Distance is relative, and symmetric: the squares of ``predicted - measured`` are divided by both, and
    weighted by the `share` of their step.
    """
    values = np.zeros(amounts.shape[1])
    predicted = seconds
    for _ in range(_FITS):
        weights = np.sqrt(share / (seconds * np.maximum(predicted, seconds / 10)))
        scaled = amounts * weights[:, None]
        size = np.maximum(np.linalg.norm(scaled, axis=0), np.finfo(float).tiny)
        gram = (scaled / size).T @ (scaled / size)
        values = _minimum(gram, (scaled / size).T @ ((seconds - rest) * weights), values * size) / size
        predicted = amounts @ values + rest
    return values


def _minimum(gram: Floats, right: Floats, start: Floats) -> Floats:
    """Return the non-negative x that minimises x gram x / 2 - right x, by coordinate descent."""
    x = start.copy()
    for _ in range(_SWEEPS):
        for i in np.flatnonzero(np.diag(gram) > 0):
            x[i] = max(0.0, x[i] + (right[i] - gram[i] @ x) / gram[i, i])
    return x
