"""The agreement of ranks about the batches that they have read: a few words per step, sent in the
background.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from meshrec.comms.collectives import InFlight, all_gather, gather_objects
from meshrec.comms.mesh import Axis, group_device
from meshrec.pipeline.in_flight import BatchInFlight

Uneven = Literal["stop", "error"]
_BITS = 62
_END, _FAILED = 1, 2


class Read(NamedTuple):
    """The batch that this rank got from its loader.

    ``batch`` is None at the end of the data and after an error. ``found`` says, for each call of a sharded
    module, whether its input lies in the batch.
    """

    batch: BatchInFlight | None
    found: list[bool]
    error: Exception | None = None


class Agreed(NamedTuple):
    """The decision of all ranks about the batches that they have read.

    ``goes_on``: whether all ranks have a batch. ``found``: the calls whose input all ranks have found.
    ``error``: the error to raise once the batches before it are trained. ``ended``: the ranks without a
    batch, if others have one.
    """

    goes_on: bool
    found: list[bool]
    error: Exception | None
    ended: list[int]


class Telling:
    """An exchange of the ranks' words about a batch, in the background."""

    def __init__(self, read: Read, axis: Axis) -> None:
        self._read, self._axis = read, axis
        status = 0
        if read.error is not None:
            status = _FAILED
        elif read.batch is None:
            status = _END
        words = torch.tensor([status, *_packed(read.found)], device=group_device(axis.group))
        self._words: InFlight = all_gather(words, axis, "status of batches")

    def agreed(self) -> Agreed:
        """Wait for the words of all ranks. The texts of errors are exchanged only if there are any."""
        words: Tensor = self._words.wait().cpu()
        read, statuses = self._read, words[:, 0].tolist()
        error: Exception | None = None
        if any(status & _FAILED for status in statuses):
            text = None if read.error is None else f"{type(read.error).__name__}: {read.error}"
            error = RuntimeError(f"the loader failed on {_texts(text, self._axis, 'errors of loaders')}")
            # The rank that failed raises its own error, with its traceback.
            error = read.error or error
        ended = [rank for rank, status in enumerate(statuses) if status & _END]
        together = words[0, 1:]
        for row in words[1:, 1:]:
            together = together & row
        found = _unpacked(together.tolist(), len(read.found))
        return Agreed(not ended and error is None, found, error, ended)

    @property
    def read(self) -> Read:
        """This rank's own batch, as it described it to the other ranks."""
        return self._read


class Checking:
    """An exchange that tells all ranks whether anybody wrote to the next batch. ``change`` is this rank's
    text.
    """

    def __init__(self, change: str | None, axis: Axis) -> None:
        self._change, self._axis = change, axis
        word = torch.tensor([change is not None], dtype=torch.int64, device=group_device(axis.group))
        self._words: InFlight = all_gather(word, axis, "checks of batches")

    def finish(self) -> None:
        """Raise ValueError on every rank if one of them has a change."""
        if bool(self._words.wait().any()):
            texts = _texts(self._change, self._axis, "changes of batches")
            raise ValueError(f"{texts}. Give every batch tensors of its own.")


def _texts(own: str | None, axis: Axis, name: str) -> str:
    texts = gather_objects(own, axis, name)
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None)


def _packed(flags: Sequence[bool]) -> list[int]:
    return [
        sum(flag << place for place, flag in enumerate(flags[first : first + _BITS]))
        for first in range(0, len(flags), _BITS)
    ]


def _unpacked(words: Sequence[int], count: int) -> list[bool]:
    return [bool(words[place // _BITS] >> place % _BITS & 1) for place in range(count)]
