"""Conversion of Arrow columns to samples. Every value is checked, without Python code per row."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshrec.data.column_kinds import DenseColumn, IdColumn
from meshrec.data.encoding import Place
from meshrec.data.faults import Faults
from meshrec.data.hashing import hash_bytes, mix, to_range
from meshrec.data.samples import Bools, Floats, Ints, Ragged, Samples

if TYPE_CHECKING:
    import numpy.typing as npt


_MISSING = ". Set missing= of its column to what stands for null"


def wrong_columns(
    found: pa.Schema, *, label: str | None, dense: Sequence[DenseColumn], ids: Sequence[IdColumn]
) -> list[str]:
    """Return what is missing or has a type that cannot be read; empty if everything fits."""
    numbers = [*([] if label is None else [label]), *(each.name for each in dense)]
    wrong = []
    for name in [*numbers, *(each.name for each in ids)]:
        if found.get_field_index(name) < 0:
            wrong.append(f"there is no column {name!r} among {found.names}")
    if wrong:
        return wrong
    for name in numbers:
        if not _is_number(found.field(name).type):
            wrong.append(f"column {name!r} has type {found.field(name).type}, expected numbers")
    for column in ids:
        kind = found.field(column.name).type
        inner = kind.value_type if _is_list(kind) else kind
        inner = inner.value_type if pa.types.is_dictionary(inner) else inner
        if not (pa.types.is_integer(inner) or (column.hashed and is_text(inner))):
            allowed = "integers or strings" if column.hashed else "integers (strings need hashed=True)"
            wrong.append(f"column {column.name!r} has type {kind}, expected {allowed}, or lists of these")
    return wrong


def encode(
    table: pa.Table,
    place: Place,
    faults: Faults,
    *,
    label: str | None,
    label_range: tuple[float, float] | None,
    dense: Sequence[DenseColumn],
    ids: Sequence[IdColumn],
) -> Samples:
    """Encode the rows of a table with the right types. Damaged rows are not ``kept``, or raise an error."""
    num = table.num_rows
    kept = np.ones(num, np.bool_)
    numbers = np.empty((num, len(dense)), np.float32)
    for number, column in enumerate(dense):
        values = _numbers(table[column.name], column.name, column.missing, place, kept=kept, faults=faults)
        numbers[:, number] = np.log1p(np.maximum(values, 0)) if column.log else values
    if label is None:
        labels = np.full(num, np.nan, np.float32)
    else:
        labels = _numbers(table[label], label, None, place, kept=kept, faults=faults)
        check_labels(labels, label_range, f"{place.name}, column {label!r}", place, kept=kept, faults=faults)
    encoded = tuple(_ids(table[column.name], column, place, kept, faults) for column in ids)
    return Samples(numbers, labels, encoded, None if kept.all() else kept)


def check_labels(
    labels: Floats,
    label_range: tuple[float, float] | None,
    where: str,
    place: Place,
    *,
    kept: Bools,
    faults: Faults,
) -> None:
    """Treat labels that the loss cannot take as damage."""
    if label_range is None:
        return
    low, high = label_range
    good = (labels >= low) & (labels <= high)
    bad = kept & ~good
    if bad.any():
        message = (
            f"{where}: row {{row}} has the label {labels[bad.argmax()]:g}, outside [{low:g}, {high:g}], "
            "which the loss takes. Make labels of this range, or set label_range"
        )
        faults.check(kept, good, message, place.first_row, place.file)


def _numbers(
    chunks: Any, name: str, missing: float | None, place: Place, *, kept: Bools, faults: Faults
) -> Floats:
    values: Floats = pc.cast(chunks, pa.float32(), safe=False).combine_chunks().to_numpy(zero_copy_only=False)
    finite = np.isfinite(values)  # null has become NaN
    good = finite if missing is None else ~np.isinf(values)
    if not good.all():
        what = f"null or not finite{_MISSING}" if missing is None else "infinite. Repair it"
        where = f"{place.name}, column {name!r}: row {{row}} is {what}"
        faults.check(kept, good, where, place.first_row, place.file)
    if not finite.all():
        values = np.where(finite, values, np.float32(missing or 0))
    return values


def _ids(chunks: Any, column: IdColumn, place: Place, kept: Bools, faults: Faults) -> Ragged:
    array = chunks.combine_chunks() if isinstance(chunks, pa.ChunkedArray) else chunks
    if not _is_list(array.type):
        offsets = np.arange(len(array) + 1, dtype=np.int64)
        return Ragged(_checked(array, offsets, column, place, kept=kept, faults=faults), offsets)
    if array.null_count:
        if column.missing is None:
            where = f"{place.name}, column {column.name!r}: row {{row}} is null{_MISSING}"
            valid = array.is_valid().to_numpy(zero_copy_only=False)
            faults.check(kept, valid, where, place.first_row, place.file)
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    elif pa.types.is_fixed_size_list(array.type):
        offsets = np.arange(len(array) + 1, dtype=np.int64) * array.type.list_size
    else:
        offsets = array.offsets.to_numpy().astype(np.int64)
        offsets -= offsets[0]
    return Ragged(_checked(array.flatten(), offsets, column, place, kept=kept, faults=faults), offsets)


def _checked(
    array: Any, offsets: Ints, column: IdColumn, place: Place, *, kept: Bools, faults: Faults
) -> Ints:
    """Return the IDs of a column, and remove rows with invalid IDs from ``kept``."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    missing: Bools | None = None
    if array.null_count:
        missing = array.is_null().to_numpy(zero_copy_only=False)
    if is_text(array.type):
        lengths, hashes = hash_bytes(array)
        missing = missing if (lengths > 0).all() else (lengths == 0)
        values = _hashed(hashes, column)
    else:
        if array.null_count:
            array = pc.fill_null(array, 0)
        raw = array.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
        values = _hashed(mix(raw.view(np.uint64)), column) if column.hashed else raw
    if missing is not None:
        if column.missing is None:
            where = f"{place.name}, column {column.name!r}: row {{row}} is null{_MISSING}"
            faults.check(kept, ~_any(missing, offsets), where, place.first_row, place.file)
        values = np.where(missing, column.missing or 0, values)
    if not column.hashed and len(values):
        _check_range(values, offsets, column, place, kept=kept, faults=faults)
    return values


def _check_range(
    values: Ints, offsets: Ints, column: IdColumn, place: Place, *, kept: Bools, faults: Faults
) -> None:
    # Seen as unsigned numbers, negative ones are large.
    if int(values.view(np.uint64).max()) < column.num_embeddings:
        return
    outside = values.view(np.uint64) >= column.num_embeddings
    where = (
        f"{place.name}, column {column.name!r}: row {{row}} has the id {values[outside.argmax()]}, outside "
        f"[0, {column.num_embeddings}). Raise num_embeddings, or use hashed=True"
    )
    faults.check(kept, ~_any(outside, offsets), where, place.first_row, place.file)


def _hashed(hashes: "npt.NDArray[np.uint64]", column: IdColumn) -> Ints:
    if column.missing == 0:
        ids = to_range(hashes, column.num_embeddings - 1)
        ids += 1
        return ids
    return to_range(hashes, column.num_embeddings)


def _any(bad: Bools, offsets: Ints) -> Bools:
    """Return for each row whether it has a bad value."""
    total = np.concatenate([[0], np.cumsum(bad)])
    rows: Bools = total[offsets[1:]] > total[offsets[:-1]]
    return rows


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def is_text(kind: pa.DataType) -> bool:
    """Return whether a type is a string or binary type."""
    text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(each(kind) for each in text)


def _is_list(kind: pa.DataType) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(each(kind) for each in lists)
