"""Read delta files. A delta contains the weight changes since the previous delta, in a folder servers watch.

Delta ``n`` has three files: ``<n>.rows.safetensors`` (IDs and full rows changed by training, per table),
``<n>.dense.safetensors`` (all other weights), and ``<n>.json`` (written last). The JSON has a checksum, the
SHA-256 digests for both other files, and the digest for the previous delta's JSON. Readers therefore detect
damage, missing deltas, and deltas from another run.

Deltas are applied in order: weights that contain delta ``n`` become the weights of delta ``n + 1`` when delta
``n + 1`` is applied. This also holds if a killed run resumes from an earlier step: the first delta after the
resume repeats all rows changed by deltas after this step.
"""

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.checkpoint.safetensors import read_whole
from meshrec.durable import DamageError, read_regular, sealed, unsealed
from meshrec.durable.sealed import check_fields, check_integer, check_names, check_object, check_string

FORMAT = 3
"""Format version of new deltas. Formats 1 and 2 are still read."""
KINDS = ("rows", "dense")
"""Kinds of safetensors files in a delta: changed table rows, and all other weights."""
# 64 MiB. The limit bounds the memory for a damaged or hostile JSON file.
_MAX_RECORD_BYTES = 1 << 26
# At most 18 digits, so that a delta number fits into int64.
_NAME = re.compile(r"[0-9]{8,18}\.json")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIELDS = ("format", "number", "run", "since", "step", "rows", "sha256", "previous")


class DeltaError(RuntimeError):
    """Raised if a delta is damaged, or does not follow the previous delta."""


class DeltaRecord(NamedTuple):
    """Content of a delta's JSON file.

    Attributes:
        number: delta number; the next delta has the next number.
        run: name of the run.
        since: training step of the previous delta.
        step: training step of this delta.
        rows: number of changed rows by table.
        sha256: SHA-256 of the safetensors files, by file name.
        previous: SHA-256 of the previous delta's JSON file; "" for the first delta.
        tracked: names of tables for which deltas contain only changed rows; None in format 1.
        whole: names of all other weights, which every delta contains completely; None in format 1.
        evicted: number of evicted IDs by hashed table, including zeros. The JSON key is "gone".
        event_time: time of the latest event in the weights, in microseconds since 1970 (UTC); None: unknown.
        digest: SHA-256 of the JSON file.
    """

    number: int
    run: str
    since: int
    step: int
    rows: dict[str, int]
    sha256: dict[str, str]
    previous: str
    tracked: list[str] | None
    whole: list[str] | None
    evicted: dict[str, int]
    event_time: int | None
    digest: str

    @property
    def published(self) -> "Published":
        """Reference to this delta, as packages and checkpoints store it."""
        return Published(self.number, self.digest)


class Published(NamedTuple):
    """Reference to a delta. Packages and checkpoints store it for the last delta their weights contain.

    Attributes:
        number: delta number.
        digest: SHA-256 of the delta's JSON file.
    """

    number: int
    digest: str


class Delta(NamedTuple):
    """Weights in a delta.

    Attributes:
        rows: changed rows by table, as a pair: IDs, int64 [U], ascending, and rows [U, D].
        whole: all weights other than tracked tables, by name.
        evicted: evicted IDs by hashed table, int64 [G], ascending.
    """

    rows: dict[str, tuple[Tensor, Tensor]]
    whole: dict[str, Tensor]
    evicted: dict[str, Tensor]


def delta_numbers(folder: str | Path) -> list[int]:
    """Return the numbers of all deltas in a folder, ascending."""
    names = [path.name for path in Path(folder).glob("[0-9]*.json") if _NAME.fullmatch(path.name)]
    # The comparison ignores names such as 0000000001.json (two spellings of a number).
    return sorted(number for name in names if delta_name(number := int(name.removesuffix(".json"))) == name)


def delta_records(folder: str | Path) -> list[DeltaRecord]:
    """Read all delta records in a folder, by ascending number.

    Raises:
        DeltaError: a record cannot be read.
    """
    return [read_record(folder, number) for number in delta_numbers(folder)]


def read_record(folder: str | Path, number: int) -> DeltaRecord:
    """Read a delta's JSON file.

    Raises:
        DeltaError: the file cannot be read, or is damaged.
    """
    path = Path(folder) / delta_name(number)
    try:
        content = read_regular(path, _MAX_RECORD_BYTES)
        return _parse_record(content, number)
    except (OSError, DamageError) as error:
        raise DeltaError(f"delta {number}: {path} cannot be read ({error}). Publish it again.") from error


def _parse_record(content: bytes, number: int) -> DeltaRecord:
    """Parse a delta's JSON file. Raise DamageError if it is invalid or belongs to another delta."""
    # The checksum is verified if there is one. Format 1 had none.
    values = unsealed(content, "it", required=False)
    version = check_integer(values.get("format"), "its format", 1, FORMAT)
    if version >= 2:
        values = unsealed(content, "it", required=True)
        if content != sealed(values):  # the next delta has the digest of exactly these bytes
            raise DamageError("its JSON is not in canonical form")
    # Unknown fields are refused; see [Note: file format versions] in manifest.py.
    required = [
        *_FIELDS,
        *(["tracked", "whole"] if version >= 2 else []),
        *(["event_time"] if version >= 3 else []),
    ]
    values = check_fields(values, "it", required, ["gone"] if version >= 2 else [])
    check_integer(values["number"], "its number", number, number)
    step = check_integer(values["step"], "its step")
    sha256 = check_fields(
        values["sha256"], "its list of digests", [delta_name(number, kind) for kind in KINDS]
    )
    for digest in sha256.values():
        if not isinstance(digest, str) or _SHA256.fullmatch(digest) is None:
            raise DamageError(f"{digest!r:.80} is not a SHA-256")
    rows = check_object(values["rows"], "its list of rows")
    evicted = check_object(values.get("gone", {}), "its list of evicted IDs")
    event_time = values.get("event_time")
    record = DeltaRecord(
        number,
        check_string(values["run"], "its run"),
        check_integer(values["since"], "the step before it", 0, step),
        step,
        {name: check_integer(num, f"its number of rows of {name!r}") for name, num in rows.items()},
        sha256,
        check_string(values["previous"], "the digest of the delta before"),
        check_names(values["tracked"], "its list of tables") if version >= 2 else None,
        check_names(values["whole"], "its list of weights") if version >= 2 else None,
        {name: check_integer(num, f"its number of evicted IDs of {name!r}") for name, num in evicted.items()},
        None if event_time is None else check_integer(event_time, "its event time"),
        hashlib.sha256(content).hexdigest(),
    )
    if record.tracked is not None and not {*record.rows, *record.evicted} <= set(record.tracked):
        raise DamageError("it has rows of a table that is not tracked")
    return record


def read_delta(folder: str | Path, record: DeltaRecord) -> Delta:
    """Read a delta's weights into memory, and verify them.

    Raises:
        DeltaError: the files are damaged, or do not match the record.
    """
    # Read first and then verified in memory, so later writes to the files have no effect.
    try:
        rows, whole = (
            read_whole(Path(folder) / (name := delta_name(record.number, kind)), record.sha256[name])
            for kind in KINDS
        )
        # The file must have exactly the tensors in the record: neither fewer nor more.
        expected = {f"{name}.{part}" for name in record.rows for part in ("ids", "rows")}
        expected |= {f"{name}.gone" for name in record.evicted}
        if set(rows) != expected or (record.whole is not None and set(whole) != set(record.whole)):
            raise DamageError("its files do not contain the tensors listed in its JSON file")
        pairs = {name: (rows[f"{name}.ids"], rows[f"{name}.rows"]) for name in record.rows}
        for name, (ids, values) in pairs.items():
            num = record.rows[name]
            if ids.dtype != torch.int64 or ids.shape != (num,) or values.ndim != 2 or len(values) != num:
                raise DamageError(f"it does not contain {num} IDs and rows of {name!r}")
            # Only hashed tables have negative IDs.
            if (num and int(ids[0]) < 0 and name not in record.evicted) or not _is_ascending(ids):
                raise DamageError(f"the IDs of {name!r} are not ascending")
        evicted = {name: rows[f"{name}.gone"] for name in record.evicted}
        for name, ids in evicted.items():
            if ids.dtype != torch.int64 or ids.shape != (record.evicted[name],) or not _is_ascending(ids):
                raise DamageError(
                    f"it does not contain {record.evicted[name]} ascending evicted IDs of {name!r}"
                )
            if name in pairs and bool(torch.isin(ids, pairs[name][0]).any()):
                raise DamageError(f"an ID of {name!r} is both evicted and updated")
    except (OSError, DamageError) as error:
        raise DeltaError(f"delta {record.number}: {error}. Publish it again.") from error
    return Delta(pairs, whole, evicted)


def _is_ascending(ids: Tensor) -> bool:
    """Return whether IDs are sorted, without duplicates."""
    return bool((ids[1:] > ids[:-1]).all())


def check_follows(record: DeltaRecord, last: Published | None, step: int) -> None:
    """Check that a delta may be applied to given weights.

    Args:
        record: the delta.
        last: last delta contained in the weights; None: they contain no delta.
        step: training step of the weights.

    Raises:
        DeltaError: the delta does not follow ``last``, or it starts after ``step``, so changes in between
            would be lost.
    """
    if last is not None and record.number != last.number + 1:
        raise DeltaError(
            f"delta {last.number + 1} is missing: {record.number} comes after {last.number}. "
            "Put it back, or export the model again."
        )
    if last is not None and record.previous != last.digest:
        raise DeltaError(
            f"delta {record.number} does not follow delta {last.number}: their digests differ. "
            "Export the model again, and publish into a new folder."
        )
    if record.since > step:
        raise DeltaError(
            f"the current weights are from step {step}, but delta {record.number} only has changes after "
            f"{record.since}. Export the run again."
        )


def verify_deltas(folder: str | Path) -> list[DeltaRecord]:
    """Read and verify all deltas in a folder.

    Returns:
        Records by ascending number.

    Raises:
        DeltaError: a delta is damaged, or does not follow the previous delta.
    """
    last: DeltaRecord | None = None
    records = delta_records(folder)
    for record in records:
        if last is not None:
            check_follows(record, last.published, last.step)
        read_delta(folder, record)
        last = record
    return records


def delta_name(number: int, kind: str | None = None) -> str:
    """Return a file name of a delta: of the JSON file, or of a safetensors file if ``kind`` is given.

    Example: ``delta_name(7)`` is "00000007.json", and ``delta_name(7, "rows")`` is
    "00000007.rows.safetensors".
    """
    return f"{number:08d}.json" if kind is None else f"{number:08d}.{kind}.safetensors"
