"""The figures of a machine, from how long the phases of some steps took.

Every phase of the cost model is a sum over the figures of a profile (seconds, or one over a bandwidth),
each times an amount that only the plan decides. So the model itself gives the amounts: it is asked about
machines on which all but one figure are nothing. The figures are those with which the sums come closest to
what was measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshrec.planner.estimators import PHASES
from meshrec.planner.evaluate import evaluate
from meshrec.planner.hardware import HardwareProfile, Link
from meshrec.planner.trials import Trial
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
_LEAST_PER_BYTE = 1e-13
_LEAST_OF_LINK = 0.1
_FITS, _SWEEPS = 20, 300


def fit(
    known: HardwareProfile,
    trials: Sequence[Trial],
    measured: Sequence[Mapping[str, float]],
    topology: Topology,
) -> HardwareProfile:
    """`known` with the figures that explain the seconds by phase `measured` for the trials.

    Its links are corrected by a factor for each kind of collective; where there is one rank they stay. What
    it says of the device, and of the sum of dense gradients, stays as well. `topology`: of the trials.
    """
    names = [*_SECONDS, *_BANDWIDTHS, *(_LINK if topology.world_size > 1 else ())]
    amounts = np.stack([_seconds(_machine_of(known, name), trials, topology) for name in names], axis=-1)
    seconds = np.array([[times.get(phase, 0.0) for phase in PHASES] for times in measured])
    some = (seconds > 0) & amounts.any(axis=-1)
    share = np.broadcast_to(seconds / seconds.sum(axis=1, keepdims=True), seconds.shape)
    found: dict[str, Any] = dict(
        zip(names, _closest(amounts[some], seconds[some], share[some]).tolist(), strict=True)
    )
    link = {name: max(found.pop(name, 1.0), _LEAST_OF_LINK) for name in _LINK}
    rates = {name: 1 / max(found.pop(name), _LEAST_PER_BYTE) for name in _BANDWIDTHS}
    return replace(
        known, intra=_corrected(known.intra, link), inter=_corrected(known.inter, link), **rates, **found
    )


def _corrected(link: Link, factors: Mapping[str, float]) -> Link:
    return replace(
        link,
        latency=link.latency * factors["latency"],
        all_to_all=link.all_to_all / factors["all_to_all"],
        reduce_scatter=link.reduce_scatter / factors["reduce_scatter"],
    )


def _machine_of(known: HardwareProfile, name: str) -> HardwareProfile:
    """One where everything but the figure `name` takes no time; only dense gradients are never summed."""
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
    """[trials, phases]."""
    topology = replace(topology, hardware=machine)
    return np.stack(
        [
            evaluate(
                {"": trial.plan(topology.world_size)}, trial.tables(), topology, batch_size=trial.batch_size
            ).phase_seconds_F
            for trial in trials
        ]
    )


def _closest(amounts: Floats, seconds: Floats, share: Floats) -> Floats:
    """What `amounts` [N, X] are to be multiplied by, nothing negative, to come close to `seconds` [N].

    Close in proportion, up and down alike: the squares of ``predicted - measured`` are weighted by one over
    both, and by the `share` of their step that they are.
    """
    values = np.zeros(amounts.shape[1])
    predicted = seconds
    for _ in range(_FITS):
        weights = np.sqrt(share / (seconds * np.maximum(predicted, seconds / 10)))
        scaled = amounts * weights[:, None]
        size = np.maximum(np.linalg.norm(scaled, axis=0), np.finfo(float).tiny)
        gram = (scaled / size).T @ (scaled / size)
        values = _minimum(gram, (scaled / size).T @ (seconds * weights), values * size) / size
        predicted = amounts @ values
    return values


def _minimum(gram: Floats, right: Floats, start: Floats) -> Floats:
    """The non-negative x that minimises x gram x / 2 - right x, one coordinate after the other."""
    x = start.copy()
    for _ in range(_SWEEPS):
        for i in np.flatnonzero(np.diag(gram) > 0):
            x[i] = max(0.0, x[i] + (right[i] - gram[i] @ x) / gram[i, i])
    return x
