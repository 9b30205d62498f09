"""The wait for rows that are on their way to memory, with one outcome for all ranks."""

from collections import Counter
from collections.abc import Sequence

import torch

from meshrec.comms.collectives import all_gather, gather_objects
from meshrec.comms.mesh import ShardingEnv
from meshrec.distributed.routing import Routing
from meshrec.tables.index import ArrivingRows
from meshrec.tables.row_file import RowFileError


class RowArrival:
    """Waits for the rows of a batch before they are looked up.

    A file may fail on one rank alone. So the ranks tell each other, in one small collective for each batch,
    and all of them raise. The same message holds a number for each band of rows whose columns lie on several
    ranks: these must have given the same slots to the same rows, as their partial sums are matched by slot.

    Args:
        routing: the plan.
        env: the ranks.
        may_fail: whether some table of the module, on any rank, may fail. If not, nothing is exchanged.
    """

    def __init__(self, routing: Routing, env: ShardingEnv, *, may_fail: bool) -> None:
        self._env, self.may_fail = env, may_fail
        bands = Counter(
            band for work in routing.work for band in {(r.table, r.r0, r.r1) for r in work.rectangles}
        )
        self._bands = {band: place for place, band in enumerate(b for b in sorted(bands) if bands[b] > 1)}

    def wait(self, pins: Sequence[object]) -> None:
        """Wait for the rows of these pins. Collective.

        Raises:
            RowFileError: rows cannot be read, or rows that make room for them cannot be written; raised on
                every rank, as are all others.
            ValueError: rows have no room in memory.
            RuntimeError: ranks have different slots for the same rows.
        """
        if not self.may_fail:
            return
        error: Exception | None = None
        told = torch.full((1 + len(self._bands),), -1, dtype=torch.int64)
        for pin in pins:
            arriving = getattr(pin, "arriving", pin)  # rows of hashed tables are pinned twice
            if isinstance(arriving, ArrivingRows):
                try:
                    arriving.wait()
                except (RowFileError, ValueError) as caught:
                    error = error or caught
                if (place := self._bands.get(arriving.band)) is not None:
                    told[1 + place] = arriving.trace
        told[0] = error is not None
        world = self._env.world
        if world.size == 1:
            if error is not None:
                raise error
            return
        everyone = all_gather(told, world, "arrival of rows").wait().view(world.size, -1)
        if everyone[:, 0].any():
            raise _combined(gather_objects(error, world, "rows that cannot come"), error)
        first = self._env.replicate.rank * self._env.shard.size
        traces = everyone[first : first + self._env.shard.size, 1:]
        most = traces.max(0).values
        if bool(((traces != most) & (traces != -1)).any()):
            raise RuntimeError(
                "ranks with other columns of the same rows have them in other slots: they did not look up "
                "the "
                "same batches in the same order, or hold on to other batches. Drop outputs of earlier "
                "batches on "
                "all ranks alike, or split the table by rows."
            )


def _combined(errors: Sequence[Exception | None], own: Exception | None) -> Exception:
    found = {rank: error for rank, error in enumerate(errors) if error is not None}
    kind = ValueError if all(isinstance(error, ValueError) for error in found.values()) else RowFileError
    made = kind("\n".join(f"rank {rank}: {error}" for rank, error in found.items()))
    made.__cause__ = own
    return made
