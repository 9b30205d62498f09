"""Detection of the rank that others wait for.

[Note: who is waited for] Ranks meet in the collectives of every step, so a step takes equally long on all
ranks. The straggler is the rank with the shortest time blocked in collectives: it computes, reads data, or
stalls while the others are blocked. Another rank's additional blocked time is time spent waiting for the
straggler; transfers block all ranks and cancel out. Host clocks are never compared.
"""

from collections.abc import Sequence
from typing import NamedTuple

from meshrec.comms.collectives import blocked_time
from meshrec.train.ranks import Ranks


class Straggler(NamedTuple):
    """The rank for which the others wait, and the share of their time that they wait for it."""

    rank: int
    share: float


class WaitClock:
    """Measures for how long collectives block this rank in each step."""

    def __init__(self) -> None:
        # Blocked seconds per step since the last `take`.
        self._steps: list[float] = []
        # Total blocked seconds at the last step or start.
        self._before = blocked_time.seconds

    def start(self) -> None:
        """Reset the clock: time blocked since the last step, as in an evaluation, does not count."""
        self._before = blocked_time.seconds

    def record_step(self) -> None:
        """Record a step."""
        now = blocked_time.seconds
        self._steps.append(now - self._before)
        self._before = now

    def take(self, ranks: Ranks, seconds: float) -> Straggler | None:
        """Return the straggler since the last call; None for a single rank. Collective.

        Args:
            ranks: the ranks, from `join`.
            seconds: total time of the recorded steps.
        """
        steps, self._steps = self._steps, []
        if ranks.size == 1 or not steps:
            return None
        return straggler(ranks.collect(steps), seconds)


def straggler(blocked: Sequence[Sequence[float]], seconds: float) -> Straggler | None:
    """Find the rank that others wait for.

    Args:
        blocked: seconds blocked in collectives, by rank and step.
        seconds: total time of the steps.
    """
    waited = [0.0] * len(blocked)
    for step in zip(*blocked, strict=False):
        least = min(step)
        # All other ranks waited for this rank, for the time they were blocked longer.
        waited[step.index(least)] += sum(step) - len(step) * least
    if not any(waited) or seconds <= 0:
        return None
    longest = max(waited)
    return Straggler(waited.index(longest), min(1.0, longest / (seconds * (len(blocked) - 1))))
