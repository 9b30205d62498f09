"""Compare measured phase times from a training run with the planner's predictions.

A run writes ``phases.jsonl``, a JSON object per line: ``phase`` (a name in `PHASES`, or ``dense``), ``rank``,
``seconds``, and ``step`` if there are several. We use the median over all steps of a phase on a rank, so that
slow first steps do not count.
"""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from meshrec.planner.estimators import PHASES
from meshrec.planner.plan_file import PlannedShardingPlan

# File in a run folder with measured phases.
PHASES_FILE = "phases.jsonl"
WHOLE_PHASES_FILE = "phases_whole.jsonl"
"""File in which a pipelined run records the steps without overlap. In these steps, no exchange
was hidden behind other work, so their phases are comparable with predictions.
"""
DENSE = "dense"
"""Name of the dense part of a step, which the planner does not predict."""


class PhaseTime(NamedTuple):
    """Measured duration of one phase, on one rank, in one step."""

    phase: str
    rank: int
    seconds: float
    step: int = 0


class Comparison(NamedTuple):
    """Predicted and measured seconds of a phase or a whole step.

    Attributes:
        phase: name in `PHASES`, ``step``, or ``step, pipelined``. A step excludes the dense part.
        predicted: seconds predicted by the planner.
        measured: measured seconds. For a phase, the median over steps on the slowest rank. For a step, the
            median over steps of the mean over ranks.
    """

    phase: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error of the prediction: 0.25 if it was 25 % too high, -0.25 if it was 25 % too low."""
        if self.measured == 0:
            return 0.0 if self.predicted == 0 else float("inf")
        return self.predicted / self.measured - 1


def write_phases(path: str | Path, times: Iterable[PhaseTime]) -> None:
    """Append measurements to a run's ``phases.jsonl``, given by path, as a JSON line per measurement."""
    with Path(path).open("a") as file:
        for time in times:
            file.write(json.dumps(time._asdict()) + "\n")


def read_phases(path: str | Path) -> list[PhaseTime]:
    """Read measured phase times.

    Args:
        path: a ``phases.jsonl`` file, or a run folder. In a run folder, ``phases_whole.jsonl`` is read if it
            has any lines, because only these phases are comparable with predictions; otherwise
            ``phases.jsonl``.

    Raises:
        ValueError: a line is invalid. The message has the line number.
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
    """Compare the measured step time of a pipelined run, without the dense part, with the prediction.

    Args:
        whole: phase times from steps without overlap, from which the dense part's duration is taken.
        hidden: phase times from pipelined steps. A phase has only the seconds in which it delayed the step,
            without the seconds which overlapped with other work.

    Raises:
        ValueError: `whole` is empty.
    """
    # The planner does not know the dense part, so the measured duration is used.
    predicted = plan.estimate().pipelined_seconds(_slowest(whole).get(DENSE, 0.0))
    return Comparison("step, pipelined", predicted, _step_seconds(hidden))


def compare(plan: PlannedShardingPlan, times: Sequence[PhaseTime]) -> list[Comparison]:
    """Compare predicted and measured seconds of every measured phase, and of the whole step without
    ``dense``.

    Raises:
        ValueError: `times` is empty.
    """
    measured = _slowest(times)
    predicted = plan.estimate().phases
    comparisons = [
        Comparison(phase, predicted[phase], measured[phase]) for phase in PHASES if phase in measured
    ]
    return [*comparisons, Comparison("step", sum(c.predicted for c in comparisons), _step_seconds(times))]


def _slowest(times: Iterable[PhaseTime]) -> dict[str, float]:
    """Return the duration of every phase on its slowest rank, in seconds, by phase name.

    The duration on a rank is the median over steps. The slowest rank may differ between phases.
    """
    by_rank: dict[str, dict[int, list[float]]] = {}
    for time in times:
        by_rank.setdefault(time.phase, {}).setdefault(time.rank, []).append(time.seconds)
    if not by_rank:
        raise ValueError("the run recorded no phases; train with phase timing on.")
    return {phase: max(map(statistics.median, ranks.values())) for phase, ranks in by_rank.items()}


def _step_seconds(times: Iterable[PhaseTime]) -> float:
    """Return the step time without the dense part: the median over steps of the mean over ranks.

    The mean is used because maxima would count waiting twice. A rank that is late in a phase makes other
    ranks wait in the next phase. So the sum of the maxima would exceed the duration of any step.
    """
    sums: dict[int, dict[int, float]] = {}
    for time in times:
        if time.phase != DENSE:
            ranks = sums.setdefault(time.step, {})
            ranks[time.rank] = ranks.get(time.rank, 0.0) + time.seconds
    return statistics.median(statistics.mean(ranks.values()) for ranks in sums.values()) if sums else 0.0
