"""Wait until the rows which a batch needs have been read from files. If a rank fails, all ranks raise."""

from collections import Counter
from collections.abc import Sequence

import torch

from meshrec.comms.agreement import gather_errors
from meshrec.comms.collectives import all_gather
from meshrec.comms.failures import KINDS, combined_error
from meshrec.comms.mesh import ShardingEnv
from meshrec.distributed.routing import Routing
from meshrec.tables.cached.file import RowFileError
from meshrec.tables.index import arriving_rows

_KINDS: tuple[type[Exception], ...] = (RowFileError, *KINDS)


class RowArrival:
    """Synchronization of all ranks on the arrival of a batch's rows in memory.

    Reading a file may fail on a single rank. The ranks therefore exchange their status in a small collective
    per batch, and raise together. The message also contains a fingerprint of the slots (memory positions) for
    every row interval whose columns are on several ranks. These ranks must have the rows in equal slots,
    because they match partial sums for a row by slot.

    Args:
        routing: the compiled plan.
        env: the ranks.
        may_fail: whether some table in the module has rows in a file, on any rank. If not, nothing is
            exchanged.
    """

    def __init__(self, routing: Routing, env: ShardingEnv, *, may_fail: bool) -> None:
        self._env, self.may_fail = env, may_fail
        # Number of ranks with columns in every band (table, first row, end row).
        bands = Counter(
            band for work in routing.work for band in {(r.table, r.r0, r.r1) for r in work.rectangles}
        )
        # Number of every band (table, first row, end row) with columns on several ranks.
        self._bands = {band: number for number, band in enumerate(b for b in sorted(bands) if bands[b] > 1)}

    def wait(self, pins: Sequence[object]) -> None:
        """Wait until all rows in a batch's slots are in memory. Collective.

        Args:
            pins: objects which reserve the batch's slots (memory positions of rows), as returned when the
                batch's keys were resolved; see ``tables.index.Resolved``.

        Raises:
            RowFileError: rows cannot be read from a file, or evicted rows cannot be written. This and the
                other errors are raised on every rank.
            ValueError: the cache has no room for the rows.
            RuntimeError: ranks have the same rows in different slots.
        """
        if not self.may_fail:
            return
        error: Exception | None = None
        # Whether this rank failed, and a fingerprint per shared band; -1 where this rank has no such rows.
        status = torch.full((1 + len(self._bands),), -1, dtype=torch.int64)
        # An error must not keep this rank from the collective below.
        for arriving in arriving_rows(pins):
            try:
                arriving.wait()
            except Exception as caught:
                error = error or caught
            if (number := self._bands.get(arriving.band)) is not None:
                status[1 + number] = arriving.trace
        status[0] = error is not None
        world = self._env.world
        if world.size == 1:
            if error is not None:
                raise error
            return
        # One small collective for both purposes: errors and fingerprints.
        statuses = all_gather(status, world, "arrival of rows").wait().view(world.size, -1)
        if statuses[:, 0].any():
            errors = gather_errors(error, world, "errors of arriving rows", _KINDS)
            raise combined_error(errors, world.size, _KINDS) from error
        # Slots may differ between replicas, but not inside a replica group.
        first = self._env.replicate.rank * self._env.shard.size
        traces = statuses[first : first + self._env.shard.size, 1:]
        # Ranks without the rows have sent -1, so the maximum is the fingerprint of some rank with the rows.
        most = traces.max(0).values
        if bool(((traces != most) & (traces != -1)).any()):
            raise RuntimeError(
                "ranks with other columns of the same rows have them in other slots: they did not look up "
                "the "
                "same batches in the same order, or hold on to other batches. Drop outputs of earlier "
                "batches on "
                "all ranks alike, or split the table by rows."
            )
