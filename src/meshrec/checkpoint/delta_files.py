"""Deltas: the changes that training made to a model since the last delta, in a folder that servers follow.

Delta ``n`` is three files: ``<n>.json`` (written last), ``<n>.rows.safetensors`` (the IDs and whole rows that
training touched, by table) and ``<n>.dense.safetensors`` (every other weight). The JSON has a checksum of
itself and the digests of the other two, and it names the digest of the JSON before it: so a gap, a delta of
another run, and damage are seen.

Weights as they were at delta ``n`` become those of delta ``n + 1`` once that is in place. This also holds
where training was killed and went on from an earlier step: its first delta then also contains the rows that
the repeated steps had changed.
"""

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.checkpoint.safetensors import read_whole
from meshrec.durable import DamageError, read_regular, sealed, unsealed
from meshrec.durable.sealed import fields, integer, mapping, text, texts

FORMAT = 2
KINDS = ("rows", "dense")
_MOST_RECORD_BYTES = 1 << 26
_NAME = re.compile(r"[0-9]{8,18}\.json")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIELDS = ("format", "number", "run", "since", "step", "rows", "sha256", "previous")


class DeltaError(RuntimeError):
    """A delta cannot be used: it is damaged, or it does not follow the one before it."""


class DeltaRecord(NamedTuple):
    """The contents of a delta's JSON file.

    Attributes:
        number: number of the delta.
        run: name of the run.
        since: the step after which the delta begins.
        step: the last step that the delta contains.
        rows: number of rows, by table.
        sha256: digests of the two files of tensors.
        previous: digest of the previous delta, or "".
        tracked: tables of which deltas contain the touched rows; None in format 1.
        whole: weights that each delta contains whole; None in format 1. With ``tracked``, these are all
            weights.
        gone: number of evicted IDs, by hashed table; every hashed table is in it.
        digest: digest of the JSON file itself.
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
    gone: dict[str, int]
    digest: str

    @property
    def published(self) -> "Published":
        """The number and digest by which packages and checkpoints name this delta."""
        return Published(self.number, self.digest)


class Published(NamedTuple):
    """The last delta whose changes some weights contain: its number and digest."""

    number: int
    digest: str


class Delta(NamedTuple):
    """Weights to put in place: IDs [U] and rows [U, D] by table, and whole tensors by name.

    ``gone``: the IDs that were evicted, int64 [G], by hashed table.
    """

    rows: dict[str, tuple[Tensor, Tensor]]
    whole: dict[str, Tensor]
    gone: dict[str, Tensor]


def delta_numbers(folder: str | Path) -> list[int]:
    """Return the numbers of a folder's deltas, in order."""
    names = [path.name for path in Path(folder).glob("[0-9]*.json") if _NAME.fullmatch(path.name)]
    return sorted(number for name in names if delta_name(number := int(name.removesuffix(".json"))) == name)


def delta_records(folder: str | Path) -> list[DeltaRecord]:
    """Return all deltas of a folder, in order.

    Raises:
        DeltaError: a delta cannot be read.
    """
    return [read_record(folder, number) for number in delta_numbers(folder)]


def read_record(folder: str | Path, number: int) -> DeltaRecord:
    """Read the JSON file of delta ``number``.

    Raises:
        DeltaError: it cannot be read, or is not what was written.
    """
    path = Path(folder) / delta_name(number)
    try:
        content = read_regular(path, _MOST_RECORD_BYTES)
        return _record(content, number)
    except (OSError, DamageError) as error:
        raise DeltaError(f"delta {number}: {path} cannot be read ({error}). Publish it again.") from error


def _record(content: bytes, number: int) -> DeltaRecord:
    said = unsealed(content, "it", required=False)
    version = integer(said.get("format"), "its format", 1, FORMAT)
    if version == FORMAT:
        said = unsealed(content, "it", required=True)
        if content != sealed(said):  # the next delta names the digest of these bytes
            raise DamageError("its form is not the one in which it was written")
    is_latest = version == FORMAT
    known = [*_FIELDS, "tracked", "whole"] if is_latest else _FIELDS
    said = fields(said, "it", known, ["gone"] if is_latest else [])
    integer(said["number"], "its number", number, number)
    step = integer(said["step"], "its step")
    sha256 = fields(said["sha256"], "its list of digests", [delta_name(number, kind) for kind in KINDS])
    for digest in sha256.values():
        if not isinstance(digest, str) or _SHA256.fullmatch(digest) is None:
            raise DamageError(f"{digest!r:.80} is not a SHA-256")
    rows = mapping(said["rows"], "its list of rows")
    gone = mapping(said.get("gone", {}), "its list of evicted IDs")
    found = DeltaRecord(
        number,
        text(said["run"], "its run"),
        integer(said["since"], "the step before it", 0, step),
        step,
        {name: integer(num, f"its number of rows of {name!r}") for name, num in rows.items()},
        sha256,
        text(said["previous"], "the digest of the delta before"),
        texts(said["tracked"], "its list of tables") if version == FORMAT else None,
        texts(said["whole"], "its list of weights") if version == FORMAT else None,
        {name: integer(num, f"its number of evicted IDs of {name!r}") for name, num in gone.items()},
        hashlib.sha256(content).hexdigest(),
    )
    if found.tracked is not None and not {*found.rows, *found.gone} <= set(found.tracked):
        raise DamageError("it has rows of a table that is not tracked")
    return found


def read_delta(folder: str | Path, record: DeltaRecord) -> Delta:
    """Read the weights of a delta into memory and verify them there, so that no later write matters.

    Raises:
        DeltaError: the files are not what was written, or do not contain what the JSON file says.
    """
    try:
        rows, whole = (
            read_whole(Path(folder) / (name := delta_name(record.number, kind)), record.sha256[name])
            for kind in KINDS
        )
        expected = {f"{name}.{part}" for name in record.rows for part in ("ids", "rows")}
        expected |= {f"{name}.gone" for name in record.gone}
        if set(rows) != expected or (record.whole is not None and set(whole) != set(record.whole)):
            raise DamageError("its files do not hold the tensors that its JSON file names")
        pairs = {name: (rows[f"{name}.ids"], rows[f"{name}.rows"]) for name in record.rows}
        for name, (ids, values) in pairs.items():
            num = record.rows[name]
            if ids.dtype != torch.int64 or ids.shape != (num,) or values.ndim != 2 or len(values) != num:
                raise DamageError(f"it does not hold {num} IDs and rows of {name!r}")
            if (num and int(ids[0]) < 0 and name not in record.gone) or not _rise(ids):
                raise DamageError(f"the IDs of {name!r} do not rise")
        gone = {name: rows[f"{name}.gone"] for name in record.gone}
        for name, ids in gone.items():
            if ids.dtype != torch.int64 or ids.shape != (record.gone[name],) or not _rise(ids):
                raise DamageError(f"it does not hold {record.gone[name]} evicted IDs of {name!r}, which rise")
            if name in pairs and bool(torch.isin(ids, pairs[name][0]).any()):
                raise DamageError(f"an ID of {name!r} has a row and is evicted")
    except (OSError, DamageError) as error:
        raise DeltaError(f"delta {record.number}: {error}. Publish it again.") from error
    return Delta(pairs, whole, gone)


def _rise(ids: Tensor) -> bool:
    return bool((ids[1:] > ids[:-1]).all())


def check_follows(record: DeltaRecord, last: Published | None, step: int) -> None:
    """Check that ``record`` is the delta after ``last``, and contains all changes since ``step``.

    Raises:
        DeltaError: it is not.
    """
    if last is not None and record.number != last.number + 1:
        raise DeltaError(
            f"delta {last.number + 1} is missing: {record.number} comes after {last.number}. "
            "Put it back, or export the model again."
        )
    if last is not None and record.previous != last.digest:
        raise DeltaError(
            f"delta {record.number} follows on another delta than {last.number} of this folder. "
            "Export the model again, and publish into a new folder."
        )
    if record.since > step:
        raise DeltaError(
            f"what is there is of step {step}, and delta {record.number} holds what changed after "
            f"{record.since}. Export the run again."
        )


def verify_deltas(folder: str | Path) -> list[DeltaRecord]:
    """Read every byte of a folder's deltas, and return them in order.

    Raises:
        DeltaError: a delta is damaged, or does not follow the one before it.
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
    return f"{number:08d}.json" if kind is None else f"{number:08d}.{kind}.safetensors"
