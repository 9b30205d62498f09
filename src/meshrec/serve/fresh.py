"""Deltas applied to the weights of a model while it answers."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshrec.checkpoint.delta_files import (
    Delta,
    DeltaError,
    DeltaRecord,
    Published,
    check_follows,
    delta_numbers,
    delta_records,
    read_delta,
    read_record,
)
from meshrec.modules.served_table import INDEX
from meshrec.serve.hashed_weights import HashedWeights

_log = logging.getLogger(__name__)
ROWS_AT_A_TIME = 1024


class Freshness(NamedTuple):
    """The last delta of a model: its number, its training step, and the reason if the next one failed."""

    delta: int | None
    step: int | None
    reason: str


class Codes(NamedTuple):
    """The quantised weights of a package: data types by name, and how the weights were rounded."""

    types: Mapping[str, str]
    rounding: str | None


class Deltas:
    """The deltas of a folder, in the order in which they are applied to a package.

    Rows of quantised tables are quantised as the package was, so that they equal those of a fresh export.

    Args:
        folder: the folder that a `DeltaPublisher` writes to.
        about: what the package's manifest says of its run, step and last delta: where to begin.
        weights: the package's weights by name; changed in place.
        until: the last delta to apply; None applies all.
        codes: the package's quantised weights.
        hashed: what the package's manifest says of hashed tables, by the name of their rows.
    """

    def __init__(
        self,
        folder: Path,
        about: Mapping[str, Any],
        weights: MutableMapping[str, Tensor],
        until: int | None = None,
        *,
        codes: Codes = Codes({}, None),  # noqa: B008 - immutable
        hashed: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._folder, self._about, self._weights, self._until = folder, about, weights, until
        self._codes = codes
        self._hashed = {
            name: HashedWeights(weights, name, formula, _bits(codes.types.get(name)))
            for name, formula in (hashed or {}).items()
        }
        self._published = _published(about)
        self._last: DeltaRecord | None = None
        self._reason = ""
        self._looked_at: int | None = None
        """Time of the folder's last change when it had no new delta; None if it must be read again."""

    @property
    def freshness(self) -> Freshness:
        """The last delta that was applied."""
        if self._last is None:
            return Freshness(None, None, self._reason)
        return Freshness(self._last.number, self._last.step, self._reason)

    def next(self) -> tuple[DeltaRecord, Delta] | None:
        """Read and check the next delta.

        Returns:
            None where there is no further delta, or none that can be used. `freshness` then says why, and the
            next call tries again.
        """
        try:
            record = self._next_record()
            delta = None if record is None else read_delta(self._folder, record)
            if record is not None and delta is not None:
                delta = self._coded(record, delta)
                self._check(record, delta)
        except Exception as error:
            self.failed(error)
            return None
        self._reason = ""
        return None if record is None or delta is None else (record, delta)

    def failed(self, error: Exception) -> None:
        """Keep the reason why the next delta cannot be applied, and log it once."""
        is_known = isinstance(error, DeltaError | ValueError | OSError)
        reason = (
            str(error) if is_known else f"the next delta cannot be used ({type(error).__name__}: {error})"
        )
        if self._reason != reason:
            self._reason = reason
            _log.error("%s: %s", self._folder, reason, exc_info=None if is_known else error)

    def portions(self, record: DeltaRecord, delta: Delta) -> Iterator[Callable[[], None]]:
        """Yield functions that together apply a delta. Call each while nothing is computed."""
        nothing = torch.empty(0, dtype=torch.int64)
        for name, hashed in self._hashed.items():
            ids, rows = delta.rows.get(name, (nothing, self._weights[name][:0]))
            yield from hashed.portions(ids, rows, delta.gone.get(name, nothing), ROWS_AT_A_TIME)
        for name, (ids, rows) in delta.rows.items():
            if name in self._hashed:
                continue
            table = self._weights[name]
            for start in range(0, len(ids), ROWS_AT_A_TIME):
                part = slice(start, start + ROWS_AT_A_TIME)
                yield lambda table=table, ids=ids[part], rows=rows[part]: table.index_copy_(0, ids, rows)  # type: ignore[misc]

        def finish() -> None:
            for name, tensor in delta.whole.items():
                self._weights[name].copy_(tensor)
            self._last = record

        yield finish

    def _next_record(self) -> DeltaRecord | None:
        stamp = self._folder.stat().st_mtime_ns if self._folder.is_dir() else 0
        if stamp == self._looked_at:
            return None  # with many deltas, each look would take long
        last, step = self._published, self._about["step"]
        if self._last is not None:
            last, step = self._last.published, self._last.step
        record = self._first_after(last, step)
        if record is None or (self._until is not None and record.number > self._until):
            # Within a second, more may come under the same stamp.
            self._looked_at = stamp if time.time_ns() - stamp > 1_000_000_000 else None
            return None
        self._looked_at = None
        if record.run != self._about.get("run"):
            raise DeltaError(
                f"delta {record.number} is of run {record.run[:100]!r}, and the package of "
                f"{self._about.get('run')!r}. Name the deltas of its own run."
            )
        check_follows(record, last, step)
        return record

    def _first_after(self, last: Published | None, step: int) -> DeltaRecord | None:
        """Return the record of the folder's next delta, which is not always the one that must follow."""
        if last is None:  # nothing was published before the package, or by an earlier release
            return next((each for each in delta_records(self._folder) if each.step > step), None)
        numbers = delta_numbers(self._folder)
        if self._last is None and numbers:
            self._check_history(numbers, last)
        number = next((each for each in numbers if each > last.number), None)
        return None if number is None else read_record(self._folder, number)

    def _check_history(self, numbers: Sequence[int], last: Published) -> None:
        """Check that the package's last delta is one of the folder's, unless it was deleted since."""
        known = last.number in numbers
        if numbers[-1] < last.number or (known and read_record(self._folder, last.number).published != last):
            raise DeltaError(
                f"the weights are those of delta {last.number}, and the folder holds deltas of another "
                "training. Export the run again."
            )

    def _coded(self, record: DeltaRecord, delta: Delta) -> Delta:
        """Return a delta with its rows quantised as the package's."""
        if not self._codes.types:
            return delta
        from meshrec.modules import DataType
        from meshrec.quant.precision import encoded

        def coded(name: str, numbers: Tensor) -> Tensor:
            if name not in self._codes.types or numbers.dtype == torch.uint8:
                return numbers
            if self._codes.rounding is None:
                raise DeltaError(
                    f"delta {record.number}: the package does not say how {name!r} was rounded. Export it "
                    "with rounding=, or from a checkpoint of `meshrec quantize`."
                )
            return encoded(numbers, DataType[self._codes.types[name]], self._codes.rounding, name)  # type: ignore[arg-type]

        return Delta(
            {name: (ids, coded(name, rows)) for name, (ids, rows) in delta.rows.items()},
            {name: coded(name, tensor) for name, tensor in delta.whole.items()},
            delta.gone,
        )

    def _check(self, record: DeltaRecord, delta: Delta) -> None:
        """Check that all of a delta fits the package, so that it is applied as a whole or not at all."""
        for name, tensor in [*((n, r) for n, (_, r) in delta.rows.items()), *delta.whole.items()]:
            weight = self._weights.get(name)
            whole = name in delta.whole
            shape = tensor.shape if whole else tensor.shape[1:]
            if (
                weight is None
                or weight.dtype != tensor.dtype
                or (weight.shape if whole else weight.shape[1:]) != shape
            ):
                raise DeltaError(
                    f"delta {record.number}: {name!r} does not fit the package. Name deltas of its own run."
                )
        if record.tracked is not None and record.whole is not None:
            said = {*record.tracked, *record.whole}
            index = {name.removesuffix("weight") + part for name in self._hashed for part in INDEX}
            if said != set(self._weights) - index or set(record.tracked) & set(record.whole):
                raise DeltaError(
                    f"delta {record.number} is of a model with other weights than the package, such as "
                    f"{sorted(said ^ (set(self._weights) - index))[:3]}. Name deltas of its own run."
                )
        if set(delta.gone) != set(self._hashed):
            raise DeltaError(
                f"delta {record.number} is of a model with other hashed tables than the package, such as "
                f"{sorted(set(delta.gone) ^ set(self._hashed))[:3]}. Name deltas of its own run."
            )
        for name, hashed in self._hashed.items():
            num = len(delta.rows[name][0]) if name in delta.rows else 0
            if num > hashed.max_rows:
                raise DeltaError(
                    f"delta {record.number}: {num:,} rows of {name!r}, which has at most "
                    f"{hashed.max_rows:,}. Publish it again."
                )
        for name, (ids, rows) in delta.rows.items():
            if name in self._hashed:
                continue
            last = len(self._weights[name]) - 1
            if len(ids) != len(rows) or (len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) <= last):
                raise DeltaError(
                    f"delta {record.number}: rows of {name!r} lie outside the table. Publish it again."
                )


def _bits(data_type: str | None) -> int:
    if data_type is None:
        return 0
    from meshrec.modules import DataType

    return DataType[data_type].bits


def _published(about: Mapping[str, Any]) -> Published | None:
    """Return the last delta that the package's weights contain."""
    said = about.get("published")
    if said is None:
        return None
    if not isinstance(said, list | tuple) or [type(each) for each in said] != [int, str]:
        raise ValueError(
            f"the package says that its weights are those of delta {said!r:.80}; a number and a digest were "
            "expected. Export the run again."
        )
    return Published(*said)


def place(deltas: Deltas) -> None:
    """Apply all deltas of a folder, while nothing is computed."""
    while (found := deltas.next()) is not None:
        with torch.no_grad():
            for portion in deltas.portions(*found):
                portion()
