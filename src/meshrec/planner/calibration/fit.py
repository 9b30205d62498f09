"""Fit the speeds in a hardware profile to measured phases of training steps.

The costs in a profile are seconds, or seconds per byte. In the cost model, the duration of a phase is a
sum over the costs, each times an amount that depends only on the plan. The model itself provides the
amounts: it is evaluated on machines where all costs but one are zero. The fit selects the costs whose
sums are closest to the measured durations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshrec.planner.calibration.trials import Trial
from meshrec.planner.estimators import PHASES
from meshrec.planner.evaluate import evaluate
from meshrec.planner.hardware import HardwareProfile, Link
from meshrec.planner.types import Floats, Topology

# Costs to fit. Durations are linear in seconds per byte, so bandwidths are fitted as their inverse.
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
_LINK = ("latency", "all_to_all", "reduce_scatter")  # factors on the separately measured links
_LEAST = 1e-30  # seconds; not 0, because the model skips work without cost
_NOTHING = 1e-20  # above any sum of such seconds, below any real amount
# A cost is undetermined if it accounts for less than this fraction of every phase.
_LEAST_SHARE = 0.01
# A link cost is undetermined if the fit makes it less than this fraction of the separately measured time.
_LEAST_OF_LINK = 0.1
# Number of reweighted fits, and number of coordinate descent sweeps per fit.
_FITS, _SWEEPS = 20, 300


def fit(
    base: HardwareProfile,
    trials: Sequence[Trial],
    measured: Sequence[Mapping[str, float]],
    topology: Topology,
) -> HardwareProfile:
    """Return a profile with the hardware costs that best explain the measured durations.

    With several ranks, the measured links are corrected by a factor per kind of collective. The device
    description and the all-reduce bandwidth are kept.

    The trials do not determine a cost that accounts for less than a hundredth of every phase. Nor do they
    determine a link that seems ten times faster than when measured alone. An undetermined cost keeps its
    value in `base`. If this value alone would take longer than some measured phase, its time is reduced to
    that of the phase. The other costs are then fitted again. `sources` of the result lists exactly the
    undetermined costs.

    Args:
        base: profile with initial costs and separately measured links.
        trials: the trials.
        measured: for every trial, seconds by phase name.
        topology: machine on which the trials ran.

    Raises:
        ValueError: the trials determine no cost.
    """
    names = [*_SECONDS, *_BANDWIDTHS, *(_LINK if topology.world_size > 1 else ())]
    # [trials, phases, costs]: the factor of a cost in the duration of a phase.
    amounts = np.stack(
        [_predicted_seconds(_single_cost_profile(base, name), trials, topology) for name in names], axis=-1
    )
    # The other costs are tiny instead of 0 and leave traces in the sums.
    amounts[amounts < _NOTHING] = 0.0
    seconds = np.array([[times.get(phase, 0.0) for phase in PHASES] for times in measured])
    # Phases that were not measured, or do not depend on any cost, give no equation.
    some = (seconds > 0) & amounts.any(axis=-1)
    share = np.broadcast_to(seconds / np.maximum(seconds.sum(axis=1, keepdims=True), _LEAST), seconds.shape)
    before = np.array([_cost_of(base, name) for name in names])
    least = np.array([_LEAST_OF_LINK if name in _LINK else 0.0 for name in names])
    used = amounts[some]
    # The value at which a cost alone would explain the whole phase.
    most = np.divide(seconds[some][:, None], used, where=used > 0, out=np.full_like(used, np.inf))
    fallback = np.minimum(before, most.min(axis=0, initial=np.inf))
    values, dropped = _fit_determined(used, seconds[some], share[some], fallback, least)
    if len(dropped) == len(names):
        raise ValueError(
            f"the {len(trials)} trials determine none of the costs {names}: measured were the seconds "
            f"{list(map(dict, measured))}; a profile takes at least one. Run again on a machine that does "
            "nothing else, and without --quick."
        )
    costs_by_name = dict(zip(names, values.tolist(), strict=True))
    link = {name: costs_by_name.pop(name, 1.0) for name in _LINK}
    rates = {name: 1 / costs_by_name.pop(name) for name in _BANDWIDTHS}
    profile_fields: dict[str, Any] = costs_by_name | rates
    sources = {
        names[i]: _fallback_reason(base, names[i], fitted, fallback[i] / before[i] if before[i] else 1.0)
        for i, fitted in sorted(dropped.items())
    }
    intra, inter = _corrected(base.intra, link), _corrected(base.inter, link)
    return replace(base, intra=intra, inter=inter, sources=sources, **profile_fields)


def _fallback_reason(base: HardwareProfile, name: str, fitted: float | None, part: float) -> str:
    """Explain to the user why a cost was not fitted, and how to measure it.

    Args:
        fitted: value which the trials suggested; None if no measured phase depends on the cost.
        part: fraction of the cost's time in `base` that is used; below 1 if `fit` had to reduce it.
    """
    fallback = "what was measured of the link alone"
    if name not in _LINK:
        fallback = f"{getattr(base, name):.4g} of the built-in profile {base.name!r}"
    if part < 1:
        fallback += f", cut to {part:.2g} times the time: a whole phase took no more"
    if fitted is None:
        why, again = "no phase measured uses it", "under torchrun, on all ranks"
    else:
        unit = "times what the link takes alone" if name in _LINK else "s"
        unit = "s per byte" if name in _BANDWIDTHS else unit
        why = f"the measured phases fit best with {fitted:.2g} {unit}, next to nothing in all of them"
        again = "on a machine that does nothing else, and without --quick"
    return f"not determined: {why}; kept is {fallback}. Run again {again}."


def _cost_of(base: HardwareProfile, name: str) -> float:
    """Return a cost of `base` in the unit of the fit.

    A bandwidth becomes seconds per byte, and a fixed cost stays in seconds. For a link cost, which is
    fitted as a factor on the measured value, the result is 1.
    """
    if name in _LINK:
        return 1.0
    value: float = getattr(base, name)
    return 1 / value if name in _BANDWIDTHS else value


def _corrected(link: Link, factors: Mapping[str, float]) -> Link:
    """Return a link with every duration multiplied by its fitted factor, given by field name."""
    return replace(
        link,
        latency=link.latency * factors["latency"],
        all_to_all=link.all_to_all / factors["all_to_all"],
        reduce_scatter=link.reduce_scatter / factors["reduce_scatter"],
    )


def _single_cost_profile(base: HardwareProfile, name: str) -> HardwareProfile:
    """Return a profile in which only the cost `name` takes time.

    If `name` is a link cost, it has its value in `base`; otherwise it has the value 1.

    The all-reduce bandwidth is nearly 0, so that the cost model never chooses the dense gradient exchange.
    """
    none = Link(latency=0.0, all_to_all=np.inf, reduce_scatter=np.inf, all_reduce=_LEAST)
    profile_fields: dict[str, Any] = dict.fromkeys(_SECONDS, _LEAST) | dict.fromkeys(_BANDWIDTHS, np.inf)
    profile_fields |= {"intra": none, "inter": none}
    if name in _LINK:
        for link in ("intra", "inter"):
            profile_fields[link] = replace(none, **{name: getattr(getattr(base, link), name)})
    else:
        profile_fields[name] = 1.0
    return replace(base, **profile_fields)


def _predicted_seconds(machine: HardwareProfile, trials: Sequence[Trial], topology: Topology) -> Floats:
    topology = replace(topology, hardware=machine)
    return np.stack(
        [
            evaluate(
                {"": trial.plan(topology.world_size)}, trial.tables(), topology, batch_size=trial.batch_size
            ).phase_seconds_F
            for trial in trials
        ]
    )


def _fit_determined(
    amounts: Floats, seconds: Floats, share: Floats, fallback: Floats, min_values: Floats
) -> tuple[Floats, dict[int, float | None]]:
    """Fit the X costs of a profile to N measured phases.

    A cost is undetermined if it contributes almost nothing to every phase, or is below `min_values`. It
    gets its value in `fallback`. Undetermined costs are removed from the fit one at a time, smallest
    contribution first, because a removal may determine another cost.

    Args:
        amounts: factor [N, X] by which a cost enters the duration of a phase.
        seconds: measured seconds [N].
        share: phase time as a fraction of the step [N].
        fallback: values [X] for undetermined costs.
        min_values: values [X] below which a cost counts as undetermined.

    Returns:
        The values [X], and a dict with the undetermined costs by index. It has a cost's last fitted
        value, or None if no measured phase depends on the cost.
    """
    dropped: dict[int, float | None] = dict.fromkeys(np.flatnonzero(~amounts.any(axis=0)).tolist())
    while True:
        free = np.array([i for i in range(len(fallback)) if i not in dropped], np.int64)
        values = fallback.copy()
        fixed_seconds = amounts @ np.where(np.isin(np.arange(len(fallback)), free), 0.0, fallback)
        values[free] = _fit_costs(amounts[:, free], seconds, share, fixed_seconds)
        # A cost's largest part in any measured phase.
        parts = (amounts * values / seconds[:, None]).max(axis=0, initial=0.0)
        unclear = [i for i in free.tolist() if parts[i] < _LEAST_SHARE or values[i] < min_values[i]]
        if not unclear:
            return values, dropped
        worst = min(unclear, key=lambda i: parts[i])
        dropped[worst] = float(values[worst])


def _fit_costs(amounts: Floats, seconds: Floats, share: Floats, fixed_seconds: Floats) -> Floats:
    """Fit hardware costs x >= 0 so that ``amounts @ x + fixed_seconds`` is close to the measured seconds.

    Minimizes the sum of ``share * (predicted - measured)^2 / (predicted * measured)`` over the phases, by
    iteratively reweighted least squares.

    Args:
        amounts: seconds of each phase per unit of each cost, [N, X].
        fixed_seconds: seconds [N] due to costs outside the fit.
    """
    values = np.zeros(amounts.shape[1])
    predicted = seconds
    for _ in range(_FITS):
        # The weight uses the last prediction. The floor bounds the
        # weight of a phase predicted near 0.
        weights = np.sqrt(share / (seconds * np.maximum(predicted, seconds / 10)))
        scaled = amounts * weights[:, None]
        # Columns are normalized, because costs differ by many orders of magnitude.
        size = np.maximum(np.linalg.norm(scaled, axis=0), np.finfo(float).tiny)
        gram = (scaled / size).T @ (scaled / size)
        values = (
            _minimum(gram, (scaled / size).T @ ((seconds - fixed_seconds) * weights), values * size) / size
        )
        predicted = amounts @ values + fixed_seconds
    return values


def _minimum(gram: Floats, right: Floats, start: Floats) -> Floats:
    """Return the x >= 0 [X] that minimizes ``x @ gram @ x / 2 - right @ x``.

    Runs a fixed number of coordinate descent sweeps from `start`.
    """
    x = start.copy()
    for _ in range(_SWEEPS):
        for i in np.flatnonzero(np.diag(gram) > 0):
            x[i] = max(0.0, x[i] + (right[i] - gram[i] @ x) / gram[i, i])
    return x
