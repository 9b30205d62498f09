"""The rank that the others wait for.

[Note: who is waited for]
Ranks meet in the collectives of every step, so that a step takes all of them the same time. The rank that
others wait for is the one that is blocked in collectives for the shortest time: it computes, reads data, or
stands still while they are blocked. The time for which another rank is blocked longer than it is time spent
waiting for it; transfers block all ranks and cancel out. Clocks of hosts are never compared.
"""

from collections.abc import Sequence
from typing import NamedTuple

from meshrec.comms.waiting import blocked_seconds
from meshrec.train.ranks import Ranks


class Straggler(NamedTuple):
    """The rank that was waited for longest, and the share of the other ranks' time that they waited for
    it.
    """

    rank: int
    share: float


class WaitClock:
    """The seconds for which collectives block this rank, step by step."""

    def __init__(self) -> None:
        self._steps: list[float] = []
        self._before = blocked_seconds()

    def start(self) -> None:
        """Reset the clock: time blocked since the last step, as in an evaluation, does not count."""
        self._before = blocked_seconds()

    def stepped(self) -> None:
        """Record a step."""
        now = blocked_seconds()
        self._steps.append(now - self._before)
        self._before = now

    def take(self, ranks: Ranks, seconds: float) -> Straggler | None:
        """Return the straggler of the steps since the last call; None for a single rank. Collective.

        Args:
            ranks: the ranks, from `join`.
            seconds: the time that these steps took.
        """
        steps, self._steps = self._steps, []
        if ranks.size == 1 or not steps:
            return None
        return straggler(ranks.collect(steps), seconds)


def straggler(blocked: Sequence[Sequence[float]], seconds: float) -> Straggler | None:
    """Find the rank that is waited for.

    Args:
        blocked: by rank, the seconds for which each step was blocked in collectives.
        seconds: the time that these steps took.
    """
    waited = [0.0] * len(blocked)
    for step in zip(*blocked, strict=False):
        least = min(step)
        waited[step.index(least)] += sum(step) - len(step) * least
    if not any(waited) or seconds <= 0:
        return None
    longest = max(waited)
    return Straggler(waited.index(longest), min(1.0, longest / (seconds * (len(blocked) - 1))))
