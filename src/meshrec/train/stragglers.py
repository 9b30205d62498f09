"""Find the rank for which the other ranks wait (the straggler).

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
    """The rank for which the other ranks wait.

    Attributes:
        rank: the rank.
        share: share of the measured time for which another rank waits for this rank, from 0 to 1. It is the
            mean over all other ranks.
    """

    rank: int
    share: float


class WaitClock:
    """Clock that measures how long this rank is blocked in collectives in every step."""

    def __init__(self) -> None:
        # Seconds blocked in every step since the last `take`.
        self._steps: list[float] = []
        # Total seconds blocked until the end of the last step, or until `start`.
        self._before = blocked_time.seconds

    def start(self) -> None:
        """Reset the clock: time blocked since the last step, such as in an evaluation, does not count."""
        self._before = blocked_time.seconds

    def record_step(self) -> None:
        """Record the blocked time of a step that has just ended."""
        now = blocked_time.seconds
        self._steps.append(now - self._before)
        self._before = now

    def take(self, ranks: Ranks, seconds: float) -> Straggler | None:
        """Return the straggler in the steps since the last call. Collective."""
        steps, self._steps = self._steps, []
        if ranks.size == 1 or not steps:
            return None
        return straggler(ranks.collect(steps), seconds)


def straggler(blocked: Sequence[Sequence[float]], seconds: float) -> Straggler | None:
    """Find the straggler from blocked times; see [Note: who is waited for].

    Args:
        blocked: seconds blocked in collectives, by rank and step.
        seconds: total time of the steps.

    Returns:
        The straggler; None if no rank waited for another.
    """
    # For how long the other ranks together waited for every rank.
    waited = [0.0] * len(blocked)
    # The lists may differ in length. Compare the steps that all ranks have recorded.
    for step in zip(*blocked, strict=False):
        least = min(step)
        # All other ranks waited for the rank with the shortest time, for as long as they were blocked longer.
        waited[step.index(least)] += sum(step) - len(step) * least
    if not any(waited) or seconds <= 0:
        return None
    # Report only the rank for which the others waited longest.
    longest = max(waited)
    return Straggler(waited.index(longest), min(1.0, longest / (seconds * (len(blocked) - 1))))
