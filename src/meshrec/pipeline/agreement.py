"""Agreement between ranks on the batches they have read: a few words per step, sent in the background."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from meshrec.comms.agreement import gather_errors
from meshrec.comms.collectives import InFlight, all_gather, gather_objects
from meshrec.comms.failures import combined
from meshrec.comms.mesh import Axis, group_device
from meshrec.pipeline.in_flight import BatchInFlight

Uneven = Literal["stop", "error"]
_END, _FAILED = 1, 2


class Read(NamedTuple):
    """The batch this rank got from its loader.

    ``batch`` is None at the end of the data and after an error. ``found`` tells, by sharded-module call,
    whether the input lies in the batch.
    """

    batch: BatchInFlight | None
    found: list[bool]
    error: Exception | None = None


class Agreed(NamedTuple):
    """The ranks' common decision on the batches they have read.

    ``goes_on``: whether all ranks have a batch. ``found``: the calls whose input all ranks have found.
    ``error``: the error to raise once all earlier batches are trained. ``ended``: ranks without a batch, if
    others have one.
    """

    goes_on: bool
    found: list[bool]
    error: Exception | None
    ended: list[int]


class Telling:
    """Background exchange of batch status between ranks. ``read`` is this rank's batch."""

    def __init__(self, read: Read, axis: Axis) -> None:
        self.read, self._axis = read, axis
        # Every rank sends in every step, even at the end or after an error, so the collectives match.
        status = 0
        if read.error is not None:
            status = _FAILED
        elif read.batch is None:
            status = _END
        words = torch.tensor([status, *read.found], dtype=torch.int64, device=group_device(axis.group))
        self._words: InFlight = all_gather(words, axis, "status of batches")

    def agreed(self) -> Agreed:
        """Wait for all ranks' status. Error messages are exchanged only if there are any."""
        words: Tensor = self._words.wait().cpu()
        read, statuses, ended = self.read, words[:, 0].tolist(), list[int]()
        error: Exception | None = None
        if _FAILED in statuses:
            error = read.error
            if self._axis.size > 1:
                errors = gather_errors(read.error, self._axis, "errors of loaders")
                error = combined(errors, self._axis.size)
                # Keep this rank's traceback.
                error.__cause__ = read.error
        if _END in statuses:
            ended = [rank for rank, status in enumerate(statuses) if status == _END]
        found: list[bool] = words[:, 1:].bool().all(0).tolist()
        return Agreed(not ended and error is None, found, error, ended)


class Checking:
    """Background check on all ranks for writes to the next batch.

    ``change`` describes this rank's write; None: no write.
    """

    def __init__(self, change: str | None, axis: Axis) -> None:
        self._change, self._axis = change, axis
        word = torch.tensor([change is not None], dtype=torch.int64, device=group_device(axis.group))
        self._words: InFlight = all_gather(word, axis, "checks of batches")

    def finish(self) -> None:
        """Raise ValueError on every rank if some rank has a change."""
        if bool(self._words.wait().any()):
            texts = enumerate(gather_objects(self._change, self._axis, "changes of batches"))
            changes = "; ".join(f"rank {rank}: {text}" for rank, text in texts if text is not None)
            raise ValueError(f"{changes}. Give every batch tensors of its own.")
