"""Keep the weights of a served model fresh, by applying deltas.

A delta is a set of changed table rows and weights which a training run publishes in a folder. Deltas have
ascending numbers.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

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
# Rows per portion (see `Deltas.portions`), which bounds the pause between batches.
ROWS_AT_A_TIME = 1024
_Value = TypeVar("_Value")


class Freshness(NamedTuple):
    """Training step that a model's weights have reached, and why they do not follow further deltas.

    Attributes:
        delta: number of the last applied delta; None: no delta was applied.
        step: training step at which that delta was published.
        reason: why the next delta cannot be applied; empty if it can be applied, or if there is none.
        event_time: Unix time of the latest event in the weights, in seconds; None: unknown, as the run
            does not train on a stream.
    """

    delta: int | None
    step: int | None
    reason: str
    event_time: float | None = None


class Quantization(NamedTuple):
    """Quantization of a package's weights. Deltas (published weight updates) are quantized in the same way.

    Attributes:
        types: `DataType` names, such as ``INT8``, by weight name. Floating-point weights are absent.
        rounding: rounding mode; None: the package does not record it.
    """

    types: Mapping[str, str]
    rounding: str | None


class Deltas:
    """Reader of the deltas in a folder, which applies them in order to a package's weights.

    A delta is an update of the weights, published by a training run. It has the changed rows of tables, the
    IDs evicted from hashed tables, and other weights as whole tensors. Rows of quantized tables are quantized
    like the package, so that they equal the rows in a new export.

    Args:
        about: field ``about`` of the package manifest. ``run``, ``step`` and ``published`` tell which delta
            is next. A package with only a part of the model has two more fields. ``trained_names`` maps the
            package's weight names to the names in training. ``left_out`` lists the missing weights.
        weights: package weights by name; changed in place.
        until: number of the last delta to apply; None: all, including future ones.
        hashed: for hashed tables, by weight name, the parameters in the manifest; see `HashedWeights`.
    """

    def __init__(
        self,
        folder: Path,
        about: Mapping[str, Any],
        weights: MutableMapping[str, Tensor],
        until: int | None = None,
        *,
        codes: Quantization = Quantization({}, None),  # noqa: B008 - immutable
        hashed: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._folder, self._about, self._weights, self._until = folder, about, weights, until
        self._codes = codes
        self._hashed = {
            name: HashedWeights(weights, name, formula, _code_bits(codes.types.get(name)))
            for name, formula in (hashed or {}).items()
        }
        # Package weight name by name in training, and names in training which the package lacks. None and an
        # empty set if the package has the whole model under the names of training.
        self._names, self._excluded_names = _trained_names(about)
        # Last delta in the exported weights; None if unknown.
        self._last_published = _last_published(about)
        # Last delta applied here; None until the first one.
        self._last: DeltaRecord | None = None
        self._reason = ""
        # Modification time of the folder when it had no new delta; None: read the folder again.
        self._checked_mtime: int | None = None

    @property
    def freshness(self) -> Freshness:
        """Last applied delta, and the reason if the next delta cannot be applied."""
        if self._last is None:
            return Freshness(None, None, self._reason)
        event_time = None if self._last.event_time is None else self._last.event_time / 1e6
        return Freshness(self._last.number, self._last.step, self._reason, event_time)

    def next(self) -> tuple[DeltaRecord, Delta] | None:
        """Read and check the next delta, without applying it.

        Returns:
            The delta and its description, both with the package's weight names. None if no further delta is
            published, or if the next delta cannot be used. In the second case `freshness` has the reason, and
            the next call tries again.
        """
        try:
            record = self._next_record()
            # Read completely before any weight changes, so that a damaged delta changes nothing.
            delta = None if record is None else read_delta(self._folder, record)
            if record is not None and delta is not None:
                record, delta = self._package_named(record, delta)
                delta = self._quantize_delta(record, delta)
                self._check(record, delta)
        except Exception as error:
            self.record_failure(error)
            return None
        self._reason = ""
        return None if record is None or delta is None else (record, delta)

    def record_failure(self, error: Exception) -> None:
        """Store why the next delta cannot be applied, for `freshness`. A new reason is also logged."""
        is_expected = isinstance(error, DeltaError | ValueError | OSError)
        reason = (
            str(error) if is_expected else f"the next delta cannot be used ({type(error).__name__}: {error})"
        )
        if self._reason != reason:
            self._reason = reason
            _log.error("%s: %s", self._folder, reason, exc_info=None if is_expected else error)

    def portions(self, record: DeltaRecord, delta: Delta) -> Iterator[Callable[[], None]]:
        """Yield functions which together apply a delta. Call them in order, while no batch is computed.

        Most functions write up to `ROWS_AT_A_TIME` rows. The last one copies all whole tensors, and sets the
        delta's number in `freshness`. Batches computed between two calls see a partly applied delta.
        """
        nothing = torch.empty(0, dtype=torch.int64)
        for name, hashed in self._hashed.items():
            ids, rows = delta.rows.get(name, (nothing, self._weights[name][:0]))
            yield from hashed.portions(ids, rows, delta.evicted.get(name, nothing), ROWS_AT_A_TIME)
        for name, (ids, rows) in delta.rows.items():
            if name in self._hashed:
                continue
            table = self._weights[name]
            for start in range(0, len(ids), ROWS_AT_A_TIME):
                part = slice(start, start + ROWS_AT_A_TIME)
                # Defaults bind the current values, so that a caller may collect portions before it calls
                # them.
                yield lambda table=table, ids=ids[part], rows=rows[part]: table.index_copy_(0, ids, rows)  # type: ignore[misc]

        def finish() -> None:
            """Copy the tensors which the delta replaces as a whole, and record the delta as applied."""
            # In one call: no batch sees some of these tensors before and others after the delta.
            for name, tensor in delta.whole.items():
                self._weights[name].copy_(tensor)
            self._last = record

        yield finish

    def _next_record(self) -> DeltaRecord | None:
        """Return the description of the delta to apply next; None if it is not published yet."""
        stamp = self._folder.stat().st_mtime_ns if self._folder.is_dir() else 0
        if stamp == self._checked_mtime:
            return None  # listing a folder of many deltas is slow, and followers poll
        last, step = self._last_published, self._about["step"]
        if self._last is not None:
            last, step = self._last.published, self._last.step
        record = self._first_record_after(last, step)
        if record is None or (self._until is not None and record.number > self._until):
            # Time stamps may be as coarse as a second, so a recent one may hide further deltas.
            self._checked_mtime = stamp if time.time_ns() - stamp > 1_000_000_000 else None
            return None
        # There is a delta: look again after it has been applied.
        self._checked_mtime = None
        self._check_run(record)
        # Raises if a delta between the last and this one is missing.
        check_follows(record, last, step)
        return record

    def _first_record_after(self, last: Published | None, step: int) -> DeltaRecord | None:
        """Return the description of the first delta in the folder that is newer than the weights.

        The result is None if the folder has no newer delta. Deltas in between may be missing, which the
        caller must check.
        """
        if last is None:  # the run had not published, or an earlier release exported the package
            for candidate in delta_records(self._folder):
                # Steps of different runs cannot be compared.
                self._check_run(candidate)
                if candidate.step > step:
                    return candidate
            return None
        available = delta_numbers(self._folder)
        # Only before the first delta is applied here; `check_follows` checks the later ones.
        if self._last is None and available:
            self._check_history(available, last)
        number = next((candidate for candidate in available if candidate > last.number), None)
        return None if number is None else read_record(self._folder, number)

    def _check_run(self, record: DeltaRecord) -> None:
        """Raise DeltaError if a delta belongs to another run than the package."""
        if record.run != self._about.get("run"):
            raise DeltaError(
                f"delta {record.number} belongs to run {record.run[:100]!r}, the package to "
                f"{self._about.get('run')!r}. Pass the deltas of the package's run, or export that run."
            )

    def _check_history(self, available: Sequence[int], last: Published) -> None:
        """Raise DeltaError if the package's last delta and the deltas in the folder are from different runs.

        Two signs show this: all numbers in the folder are below that of the last delta, or the folder has
        another delta with the same number.
        """
        is_present = last.number in available
        if available[-1] < last.number or (
            is_present and read_record(self._folder, last.number).published != last
        ):
            raise DeltaError(
                f"the package has the weights of delta {last.number}, but the folder has deltas of another "
                "training. Export the run again."
            )

    def _index(self) -> set[str]:
        """Return the names of the index tensors of all hashed tables: ``buckets``, ``added``, ``added_rows``.

        Deltas do not contain these tensors, because servers update them; see `HashedWeights`.
        """
        return {name.removesuffix("weight") + part for name in self._hashed for part in INDEX}

    def _package_named(self, record: DeltaRecord, delta: Delta) -> tuple[DeltaRecord, Delta]:
        """Translate a delta's weight names from the names in training to the names in the package.

        Weights that the package lacks are left out.
        """
        if self._names is None:
            return record, delta
        package_names = self._names
        if computed := sorted(set(self._weights) - self._index() - set(package_names.values())):
            raise DeltaError(
                f"delta {record.number}: {computed[0]!r} was computed for the package from trained weights, "
                "so a delta cannot change it. Export the run again for newer weights."
            )

        def named(values: Mapping[str, _Value]) -> dict[str, _Value]:
            """Return the values by package name, without weights that the package lacks."""
            return {
                package_names.get(name, name): value
                for name, value in values.items()
                if name not in self._excluded_names
            }

        def names(given: list[str] | None) -> list[str] | None:
            """Return the package names for a list of names in training; None for None."""
            return None if given is None else list(named(dict.fromkeys(given)))

        record = record._replace(tracked=names(record.tracked), whole=names(record.whole))
        return record, Delta(named(delta.rows), named(delta.whole), named(delta.evicted))

    def _quantize_delta(self, record: DeltaRecord, delta: Delta) -> Delta:
        """Return the delta with its rows and whole tensors quantized like the package.

        Weights that the package has in floating point, and values that are quantized already, do not change.
        """
        if not self._codes.types:
            return delta
        from meshrec.modules import DataType
        from meshrec.quant.precision import encode_rows

        def quantized(name: str, values: Tensor) -> Tensor:
            """Return values of one weight, quantized if the package has this weight in quantized form."""
            if name not in self._codes.types or values.dtype == torch.uint8:
                return values
            if self._codes.rounding is None:
                raise DeltaError(
                    f"delta {record.number}: the package does not record the rounding of {name!r}. Export it "
                    "with rounding=, or from a checkpoint of `meshrec quantize`."
                )
            return encode_rows(values, DataType[self._codes.types[name]], self._codes.rounding, name)  # type: ignore[arg-type]

        return Delta(
            {name: (ids, quantized(name, rows)) for name, (ids, rows) in delta.rows.items()},
            {name: quantized(name, tensor) for name, tensor in delta.whole.items()},
            delta.evicted,
        )

    def _check(self, record: DeltaRecord, delta: Delta) -> None:
        """Check that a delta fits the package, so that it is applied completely or not at all."""
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
                    f"delta {record.number}: {name!r} does not fit the package. Pass deltas of its run."
                )
        if record.tracked is not None and record.whole is not None:
            # A delta lists all weights of the model, changed or not.
            published_names = {*record.tracked, *record.whole}
            weight_names = set(self._weights) - self._index()
            if published_names != weight_names or set(record.tracked) & set(record.whole):
                raise DeltaError(
                    f"delta {record.number} has other weights than the package, such as "
                    f"{sorted(published_names ^ weight_names)[:3]}. Pass deltas of its run."
                )
        if set(delta.evicted) != set(self._hashed):
            raise DeltaError(
                f"delta {record.number} has other hashed tables than the package, such as "
                f"{sorted(set(delta.evicted) ^ set(self._hashed))[:3]}. Pass deltas of the package's run."
            )
        for name, hashed in self._hashed.items():
            num = len(delta.rows[name][0]) if name in delta.rows else 0
            if num > hashed.max_rows:
                raise DeltaError(
                    f"delta {record.number}: {num:,} rows for {name!r}, which has at most "
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


def _code_bits(data_type: str | None) -> int:
    """Return the bits per value of a `DataType` name; 0 for None (floating point)."""
    if data_type is None:
        return 0
    from meshrec.modules import DataType

    return DataType[data_type].bits


def _trained_names(about: Mapping[str, Any]) -> tuple[dict[str, str] | None, frozenset[str]]:
    """Return a map from weight names in training to weight names in the package.

    Returns:
        A pair. The first element maps a name in training to the name in the package; it is None if all names
        are the same. The second element has the names in training of weights that the package lacks.
    """
    if "trained_names" not in about:
        return None, frozenset()
    names, left_out = about["trained_names"], about.get("left_out", [])
    is_valid = isinstance(names, dict) and isinstance(left_out, list)
    if not is_valid or not all(isinstance(name, str) for name in (*names.values(), *left_out)):
        raise ValueError(
            "the package's names of trained weights are not a mapping of names and a list. Export the run "
            "again."
        )
    return {trained: name for name, trained in names.items()}, frozenset(left_out)


def _last_published(about: Mapping[str, Any]) -> Published | None:
    """Return number and digest of the last delta published before the export; None without such a delta."""
    published = about.get("published")
    if published is None:
        return None
    # A bool is an int in Python, so types are compared exactly.
    if not isinstance(published, list | tuple) or [type(part) for part in published] != [int, str]:
        raise ValueError(
            f"the package's last delta is {published!r:.80}; a number and a digest were "
            "expected. Export the run again."
        )
    return Published(*published)


def apply_deltas(deltas: Deltas) -> None:
    """Apply all deltas which are available now. No batch may be running."""
    while (next_delta := deltas.next()) is not None:
        with torch.no_grad():
            for portion in deltas.portions(*next_delta):
                portion()
