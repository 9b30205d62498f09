"""Deltas: what training changed in a model since the last one, in a folder that servers follow.

Delta ``n`` is ``<n>.json`` (written last), ``<n>.rows.safetensors`` (of each tracked table the ids and whole
rows that were touched) and ``<n>.dense.safetensors`` (every other weight). Each names the digest of the one
before, so that a gap, a stranger or damage is seen.

Weights of training as it was at delta ``n`` become those of delta ``n + 1`` once that is in place. This also
holds where training was killed and went on from an earlier step: the first delta from then on also has
the rows of those that came from the steps which are done again.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshrec.checkpoint.agreement import agreed, ranks_of
from meshrec.checkpoint.delta import RowTracker, write_tensors
from meshrec.checkpoint.tables import read_weights
from meshrec.durable import sha256_of, write_durably
from meshrec.model_parallel import DistributedModelParallel

FORMAT = 1


class DeltaError(RuntimeError):
    """A delta cannot be used: it is damaged, or it does not follow on what is there."""


class DeltaRecord(NamedTuple):
    """What the JSON file of a delta says: training steps ``(since, step]``, rows by table, digests."""

    number: int
    run: str
    since: int
    step: int
    rows: dict[str, int]
    sha256: dict[str, str]
    previous: str
    digest: str

    @property
    def published(self) -> "Published":
        """What names it."""
        return Published(self.number, self.digest)


class Published(NamedTuple):
    """The delta that weights hold all of: its number and digest."""

    number: int
    digest: str


class Delta(NamedTuple):
    """Weights to put in place: by table ids [U] and rows [U, D], and whole tensors by name."""

    rows: dict[str, tuple[Tensor, Tensor]]
    whole: dict[str, Tensor]


class DeltaPublisher:
    """Writes the deltas of a model that trains. Collective, all of it.

    Args:
        model: whose fused tables are tracked from now on.
        folder: for the deltas; those that are there are continued.
        run: the run's name, which packages of its checkpoints carry, too.
        step: the training step that was done last.
        after: the last delta of these weights, as `last` was when they were saved; None: what was published
            of later steps than ``step`` is done again.

    Attributes:
        last: the delta that the weights of now hold all of, once `publish` has returned; None: no delta.

    Raises:
        ValueError: on every rank, when the deltas that are there cannot be continued.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        folder: str | Path,
        *,
        run: str,
        step: int,
        after: Published | None = None,
    ) -> None:
        self._model, self._folder, self._run = model, Path(folder), run
        self._tracker = RowTracker(model)
        self._axis = ranks_of(None)
        self._step, self._updates = step, self._tracker.step

        def begin() -> tuple[Published | None, dict[str, Tensor]]:
            try:
                return self._found(step, after) if self._axis.rank == 0 else (None, {})
            except DeltaError as error:
                raise ValueError(
                    f"the deltas of {self._folder} cannot be continued: {error} Or move the folder away, and "
                    "export the run again for its servers."
                ) from error

        self.last, self._owed = agreed(self._axis, begin, "reading the deltas that are there")[0]

    def publish(self, step: int) -> None:
        """Writes what changed since the last delta; nothing where no step was made.

        Raises:
            CheckpointError: on every rank, when it cannot be written; the next one then holds more.
        """
        if step == self._step:
            return
        number = self.last.number + 1 if self.last is not None else 1
        rows_path, dense_path = (self._folder / _name(number, kind) for kind in ("rows", "dense"))
        updates = self._tracker.step
        rows = self._tracker.export(rows_path, since=self._updates, also=self._owed)
        whole = self._untracked()

        def finish() -> Published | None:
            if self._axis.rank:
                return None
            write_tensors(dense_path, whole)
            said = {
                "format": FORMAT,
                "number": number,
                "run": self._run,
                "since": self._step,
                "step": step,
                "rows": rows,
                "sha256": {path.name: sha256_of(path) for path in (rows_path, dense_path)},
                "previous": self.last.digest if self.last is not None else "",
            }
            write_durably(self._folder / _name(number), (json.dumps(said, indent=1) + "\n").encode())
            return read_record(self._folder, number).published

        self.last = agreed(self._axis, finish, "publishing a delta")[0]
        self._step, self._updates, self._owed = step, updates, {}

    def _found(self, step: int, after: Published | None) -> tuple[Published | None, dict[str, Tensor]]:
        """The last delta, and by table the ids of rows that deltas after these weights hold."""
        self._folder.mkdir(parents=True, exist_ok=True)
        records = delta_records(self._folder)
        if after is not None:
            later = [record for record in records if record.number > after.number]
            if later and later[-1].number - after.number != len(later):
                raise DeltaError(
                    f"some of the deltas {after.number + 1} to {later[-1].number} are missing, and servers "
                    "may have them. Put them back."
                )
        else:
            later = [record for record in records if record.step > step]
        ids: dict[str, list[Tensor]] = {}
        for record in later:
            for name, (rows, _) in read_delta(self._folder, record).rows.items():
                ids.setdefault(name, []).append(rows)
        last = records[-1].published if records else None
        if after is not None and (last is None or last.number < after.number):
            last = after  # deltas were taken away, and whoever has them goes on from there
        return last, {name: torch.cat(each).unique() for name, each in ids.items()}

    def _untracked(self) -> dict[str, Tensor]:
        """Whole tensors of what the tracker does not watch."""
        tracked = set(self._tracker.names)
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        found = {}
        for name, tensor in named:
            if name not in tracked:
                full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                found[name] = full.detach().cpu().contiguous()
        return found


def delta_numbers(folder: str | Path) -> list[int]:
    """The numbers of a folder's deltas, in order."""
    return sorted(int(path.stem) for path in Path(folder).glob("[0-9]*.json") if path.stem.isdigit())


def delta_records(folder: str | Path) -> list[DeltaRecord]:
    """All deltas of a folder, in order.

    Raises:
        DeltaError: for one that cannot be read.
    """
    return [read_record(folder, number) for number in delta_numbers(folder)]


def read_record(folder: str | Path, number: int) -> DeltaRecord:
    """What delta ``number`` says of itself.

    Raises:
        DeltaError: when it cannot be read.
    """
    path = Path(folder) / _name(number)
    try:
        data = path.read_bytes()
        said: dict[str, Any] = json.loads(data)
        if said.pop("format") != FORMAT or said["number"] != number:
            raise ValueError("it is of another format or number")
        return DeltaRecord(**said, digest=hashlib.sha256(data).hexdigest())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DeltaError(f"delta {number}: {path} cannot be read ({error}). Publish it again.") from error


def read_delta(folder: str | Path, record: DeltaRecord) -> Delta:
    """The weights of a delta, mapped into memory.

    Raises:
        DeltaError: for files that are not what was written.
    """
    for name, digest in record.sha256.items():
        path = Path(folder) / name
        if not path.is_file() or sha256_of(path) != digest:
            raise DeltaError(f"delta {record.number}: {path} is not what was written. Publish it again.")
    rows = read_weights(Path(folder) / _name(record.number, "rows"))
    whole = read_weights(Path(folder) / _name(record.number, "dense"))
    return Delta({name: (rows[f"{name}.ids"], rows[f"{name}.rows"]) for name in record.rows}, whole)


def check_follows(record: DeltaRecord, last: Published | None, step: int) -> None:
    """Whether ``record`` is the one after ``last``, and holds all that changed since ``step``.

    Raises:
        DeltaError: when it is not.
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
    """Reads every byte of a folder's deltas; gives them in order.

    Raises:
        DeltaError: for the first that is damaged or does not follow.
    """
    last: DeltaRecord | None = None
    records = delta_records(folder)
    for record in records:
        if last is not None:
            check_follows(record, last.published, last.step)
        read_delta(folder, record)
        last = record
    return records


def _name(number: int, kind: str | None = None) -> str:
    return f"{number:08d}.json" if kind is None else f"{number:08d}.{kind}.safetensors"
