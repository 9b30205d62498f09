"""A training run's measured phase times, compared with the plan's predictions.

A run writes ``phases.jsonl``, a JSON object per line: ``phase`` (a name in `PHASES`, or ``dense``), ``rank``,
``seconds``, and ``step`` if there are several. We use the median over lines per phase and rank, so that slow
first steps do not count.
"""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from meshrec.planner.estimators import PHASES
from meshrec.planner.plan_file import PlannedShardingPlan

PHASES_FILE = "phases.jsonl"
WHOLE_PHASES_FILE = "phases_whole.jsonl"
"""File with the steps of a pipelined run without overlapping exchanges, comparable with estimates."""
DENSE = "dense"


class PhaseTime(NamedTuple):
    """Measured phase seconds in a step on a rank."""

    phase: str
    rank: int
    seconds: float
    step: int = 0


class Comparison(NamedTuple):
    """Predicted and measured seconds for a phase or a step.

    Attributes:
        phase: name in `PHASES`, ``step``, or ``step, pipelined``. A step excludes the dense part.
        predicted: seconds estimated by the planner.
        measured: for a phase, the slowest rank's median. For a step, the median of the rank means.
    """

    phase: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative prediction error: 0.25 predicts a quarter too much time, -0.25 a quarter too little."""
        if self.measured == 0:
            return 0.0 if self.predicted == 0 else float("inf")
        return self.predicted / self.measured - 1


def write_phases(path: str | Path, times: Iterable[PhaseTime]) -> None:
    """Append measurements to a run's ``phases.jsonl``."""
    with Path(path).open("a") as file:
        for time in times:
            file.write(json.dumps(time._asdict()) + "\n")


def read_phases(path: str | Path) -> list[PhaseTime]:
    """Read a ``phases.jsonl``, or the file in a run folder which is comparable with an estimate.

    Raises:
        ValueError: invalid line; the error has the line number.
    """
    path = Path(path)
    if path.is_dir():
        whole = path / WHOLE_PHASES_FILE
        has_whole = whole.is_file() and whole.stat().st_size > 0  # a short run recorded none
        path = whole if has_whole else path / PHASES_FILE
    times = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            time = PhaseTime(**json.loads(line))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path}:{number}: {error}; a line has phase, rank, seconds, and step."
            ) from error
        if time.phase not in (*PHASES, DENSE):
            raise ValueError(f"{path}:{number}: phase {time.phase!r} must be one of {[*PHASES, DENSE]}.")
        times.append(time)
    return times


def compare_pipelined(
    plan: PlannedShardingPlan, whole: Sequence[PhaseTime], hidden: Sequence[PhaseTime]
) -> Comparison:
    """Compare a pipelined run's step time, without the dense part, with the prediction.

    Args:
        plan: the run's plan.
        whole: times for steps without overlapping exchanges; they give the dense time.
        hidden: times for pipelined steps: per phase, the part which was not hidden.

    Raises:
        ValueError: no times.
    """
    predicted = plan.estimate().pipelined_seconds(_slowest(whole).get(DENSE, 0.0))
    return Comparison("step, pipelined", predicted, _step_seconds(hidden))


def compare(plan: PlannedShardingPlan, times: Sequence[PhaseTime]) -> list[Comparison]:
    """Compare predicted and measured seconds per measured phase, and for the whole ``step``, without phase
    ``dense``.

    Raises:
        ValueError: no times.
    """
    measured = _slowest(times)
    predicted = plan.estimate().phases
    comparisons = [
        Comparison(phase, predicted[phase], measured[phase]) for phase in PHASES if phase in measured
    ]
    return [*comparisons, Comparison("step", sum(c.predicted for c in comparisons), _step_seconds(times))]


def _slowest(times: Iterable[PhaseTime]) -> dict[str, float]:
    """Return the slowest rank's median per phase."""
    by_rank: dict[str, dict[int, list[float]]] = {}
    for time in times:
        by_rank.setdefault(time.phase, {}).setdefault(time.rank, []).append(time.seconds)
    if not by_rank:
        raise ValueError("the run recorded no phases; train with phase timing on.")
    return {phase: max(map(statistics.median, ranks.values())) for phase, ranks in by_rank.items()}


def _step_seconds(times: Iterable[PhaseTime]) -> float:
    """Return the median over steps of the phase sum without ``dense``, averaged over ranks.

    A rank which is late in a phase makes others wait in the next phase, so adding up the slowest ranks of all
    phases would exceed the duration of any step.
    """
    sums: dict[int, dict[int, float]] = {}
    for time in times:
        if time.phase != DENSE:
            ranks = sums.setdefault(time.step, {})
            ranks[time.rank] = ranks.get(time.rank, 0.0) + time.seconds
    return statistics.median(statistics.mean(ranks.values()) for ranks in sums.values()) if sums else 0.0
