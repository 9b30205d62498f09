"""Predicted against measured: a training run's phase times next to the model's.

A run writes ``phases.jsonl``: one JSON object per line with ``phase`` (a name of `PHASES`, or ``dense``),
``rank``, ``seconds``, and ``step`` where the run has several. Lines of the same phase and rank are averaged
by their median, so that the first steps' warming up does not count.
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
"""Of a pipelined run: steps in which no exchange hides behind other work, of which estimates speak."""
DENSE = "dense"


class PhaseTime(NamedTuple):
    """One measurement: a phase of one step on one rank."""

    phase: str
    rank: int
    seconds: float
    step: int = 0


class Comparison(NamedTuple):
    """A phase (or ``step``, their sum): predicted and measured seconds of the slowest rank."""

    phase: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """The prediction's relative error: 0.25 is a quarter too slow, -0.25 a quarter too fast."""
        if self.measured == 0:
            return 0.0 if self.predicted == 0 else float("inf")
        return self.predicted / self.measured - 1


def write_phases(path: str | Path, times: Iterable[PhaseTime]) -> None:
    """Appends measurements to a run's ``phases.jsonl``."""
    with Path(path).open("a") as file:
        for time in times:
            file.write(json.dumps(time._asdict()) + "\n")


def read_phases(path: str | Path) -> list[PhaseTime]:
    """Reads ``phases.jsonl``, or what the run's folder holds to compare with an estimate. ValueError names
    the line that is wrong.
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
    """The step of a pipelined run, without its dense part: ``hidden`` has what of its phases nothing hid,
    ``whole`` what they and the dense part take by themselves.

    Raises:
        ValueError: where one of them is empty.
    """
    alone, together = _slowest(whole), _slowest(hidden)
    predicted = plan.estimate().pipelined_seconds(alone.get(DENSE, 0.0))
    measured = sum(seconds for phase, seconds in together.items() if phase != DENSE)
    return Comparison("step, pipelined", predicted, measured)


def compare(plan: PlannedShardingPlan, times: Iterable[PhaseTime]) -> list[Comparison]:
    """Prediction next to measurement, per phase that was measured, and their sums as ``step``. ``dense``
    is left out."""
    measured = _slowest(times)
    predicted = plan.estimate().phases
    found = [Comparison(phase, predicted[phase], measured[phase]) for phase in PHASES if phase in measured]
    total = Comparison("step", sum(c.predicted for c in found), sum(c.measured for c in found))
    return [*found, total]


def _slowest(times: Iterable[PhaseTime]) -> dict[str, float]:
    """By phase the slowest rank's median."""
    by_rank: dict[str, dict[int, list[float]]] = {}
    for time in times:
        by_rank.setdefault(time.phase, {}).setdefault(time.rank, []).append(time.seconds)
    if not by_rank:
        raise ValueError("the run recorded no phase; train with phase timing on.")
    return {phase: max(map(statistics.median, ranks.values())) for phase, ranks in by_rank.items()}
