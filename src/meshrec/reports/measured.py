"""Measured phase times of a training run, beside the predictions of its plan.

A run writes ``phases.jsonl``, one JSON object per line: ``phase`` (a name of `PHASES`, or ``dense``),
``rank``, ``seconds``, and ``step`` if the run has several. We take the median over the lines of a phase and
rank, so that slow first steps do not count.
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
"""The file with the steps of a pipelined run in which no exchange overlaps, for comparison with estimates."""
DENSE = "dense"


class PhaseTime(NamedTuple):
    """A measurement: the seconds of a phase of one step on one rank."""

    phase: str
    rank: int
    seconds: float
    step: int = 0


class Comparison(NamedTuple):
    """Predicted and measured seconds of a phase on its slowest rank, or of the whole ``step``."""

    phase: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error of the prediction: 0.25 predicts a quarter too much time, -0.25 a quarter too
        little.
        """
        if self.measured == 0:
            return 0.0 if self.predicted == 0 else float("inf")
        return self.predicted / self.measured - 1


def write_phases(path: str | Path, times: Iterable[PhaseTime]) -> None:
    """Add measurements to a run's ``phases.jsonl``."""
    with Path(path).open("a") as file:
        for time in times:
            file.write(json.dumps(time._asdict()) + "\n")


def read_phases(path: str | Path) -> list[PhaseTime]:
    """Read a ``phases.jsonl``, or the file in a run's folder that is comparable with an estimate.

    Raises:
        ValueError: A line is invalid; the error names it.
    """
    path = Path(path)
    if path.is_dir():
        whole = path / WHOLE_PHASES_FILE
        has_whole = whole.is_file() and whole.stat().st_size > 0  # a short run recorded none
        path = whole if has_whole else path / PHASES_FILE
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            time = PhaseTime(**json.loads(line))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path}:{number}: {error}; a line has phase, rank, seconds, and step."
            ) from error
        if time.phase not in (*PHASES, DENSE):
            raise ValueError(f"{path}:{number}: phase {time.phase!r} must be one of {[*PHASES, DENSE]}.")
        found.append(time)
    return found


def compare_pipelined(
    plan: PlannedShardingPlan, whole: Sequence[PhaseTime], hidden: Sequence[PhaseTime]
) -> Comparison:
    """Compare the step of a pipelined run, without its dense part, with the prediction.

    Args:
        plan: the plan of the run.
        whole: times of steps whose exchanges do not overlap. They give the time of the dense part.
        hidden: times of pipelined steps: for each phase, the part that nothing hid.

    Raises:
        ValueError: one of them is empty.
    """
    predicted = plan.estimate().pipelined_seconds(_slowest(whole).get(DENSE, 0.0))
    return Comparison("step, pipelined", predicted, _step_seconds(hidden))


def compare(plan: PlannedShardingPlan, times: Sequence[PhaseTime]) -> list[Comparison]:
    """Return the predicted and measured seconds of each measured phase, and of the whole ``step``.

    The phase ``dense`` is left out.

    Raises:
        ValueError: there are no times.
    """
    measured = _slowest(times)
    predicted = plan.estimate().phases
    found = [Comparison(phase, predicted[phase], measured[phase]) for phase in PHASES if phase in measured]
    return [*found, Comparison("step", sum(c.predicted for c in found), _step_seconds(times))]


def _slowest(times: Iterable[PhaseTime]) -> dict[str, float]:
    """Return, for each phase, the median of the slowest rank."""
    by_rank: dict[str, dict[int, list[float]]] = {}
    for time in times:
        by_rank.setdefault(time.phase, {}).setdefault(time.rank, []).append(time.seconds)
    if not by_rank:
        raise ValueError("the run recorded no phase; train with phase timing on.")
    return {phase: max(map(statistics.median, ranks.values())) for phase, ranks in by_rank.items()}


def _step_seconds(times: Iterable[PhaseTime]) -> float:
    """Return the median over steps of a step's phases without ``dense``, their sum averaged over the ranks.

    A rank that is late in a phase makes the others wait in the next one. The slowest ranks of all phases
    together would take longer than any step.
    """
    sums: dict[int, dict[int, float]] = {}
    for time in times:
        if time.phase != DENSE:
            ranks = sums.setdefault(time.step, {})
            ranks[time.rank] = ranks.get(time.rank, 0.0) + time.seconds
    return statistics.median(statistics.mean(ranks.values()) for ranks in sums.values()) if sums else 0.0
