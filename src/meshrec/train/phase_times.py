"""Time per phase for some training steps, written next to the run's metrics."""

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from meshrec.distributed import record_phases
from meshrec.planner.measured import PhaseTime, write_phases
from meshrec.train.ranks import Ranks
from meshrec.train.run_folder import RunFolder

_logger = logging.getLogger("meshrec.train")


class PhaseTimes:
    """Recorder for the time per phase.

    If exchanges overlap with computation, the step after a recorded step waits for every exchange and is
    recorded as well. The difference between both steps is the time hidden by the overlap.

    Args:
        every: steps between recordings; 0: none.
        folder: run folder; None: nothing is recorded.
        ranks: the ranks, which record the same steps.
        is_pipelined: whether exchanges overlap with computation.
    """

    def __init__(self, every: int, folder: RunFolder | None, ranks: Ranks, *, is_pipelined: bool) -> None:
        self._every, self._folder, self._ranks, self._is_pipelined = every, folder, ranks, is_pipelined
        # Times for steps with overlap, and for steps that wait for every exchange; cleared by `write`.
        self._times: tuple[list[PhaseTime], list[PhaseTime]] = ([], [])

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Record the step after ``step`` steps, if a recording is due."""
        every = self._every
        # Not in the first steps, which allocate memory.
        place = step % every - every // 2 if every and self._folder is not None else -1
        if place != 0 and not (place == 1 and self._is_pipelined):
            yield
            return
        with record_phases(device=self._ranks.device, overlap=place == 0) as seconds:
            yield
        rank = self._ranks.rank
        self._times[place].extend(PhaseTime(name, rank, value, step + 1) for name, value in seconds.items())

    def write(self) -> None:
        """Write the recorded times from all ranks. Collective."""
        if not self._every or self._folder is None:
            return
        times, self._times = self._times, ([], [])
        found = self._ranks.collect(times)
        if self._ranks.is_first:
            try:
                write_phases(self._folder.phases, itertools.chain(*(each for each, _ in found)))
                if self._is_pipelined:
                    write_phases(self._folder.whole_phases, itertools.chain(*(each for _, each in found)))
            except OSError as error:
                _logger.warning("the time per phase is not kept: %s", error)
