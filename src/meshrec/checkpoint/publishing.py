"""Publish deltas (files with changed weights) during training; ``delta_files.py`` has the format."""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from meshrec.checkpoint.agreement import agreed, ranks_of
from meshrec.checkpoint.delta import RowTracker, write_tensors
from meshrec.checkpoint.delta_files import (
    FORMAT,
    KINDS,
    DeltaError,
    Published,
    delta_name,
    delta_numbers,
    delta_records,
    read_delta,
    read_record,
)
from meshrec.durable import remove_named, sealed, sha256_of, write_durably
from meshrec.model_parallel import DistributedModelParallel

_log = logging.getLogger(__name__)


class DeltaPublisher:
    """Writer of model deltas during training, from which servers update their copy of the model.

    All methods are collective.

    Args:
        model: the model. From now on, the publisher records which rows of fused tables change.
        folder: folder for deltas. If it already has deltas, the next delta continues their numbers.
        run: run name, also stored in packages exported from the run's checkpoints.
        step: training step up to which deltas have the changes of the model's weights: the value of
            `published_step` when the weights were saved. Without ``unpublished``, the step of the weights.
        after: last delta contained in the model's weights, which is the value of `last` when the weights were
            saved. If None, this delta is unknown, and the next delta repeats the rows of all deltas after
            ``step``.
        unpublished: the value of `unpublished_ids` when the weights were saved: IDs by table name whose
            changes are in no delta. The next delta has their rows.

    Attributes:
        last: last published delta; None before the first.
        published_step: training step at the last published delta.

    Raises:
        ValueError: the existing deltas cannot be continued; raised on every rank.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        folder: str | Path,
        *,
        run: str,
        step: int,
        after: Published | None = None,
        unpublished: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._model, self._folder, self._run = model, Path(folder), run
        # Records from now on. After resharding it raises, and needs a new publisher.
        self._tracker = RowTracker(model)
        self._axis = ranks_of(None)
        # Training step at the last published delta. Changes after this optimizer update, and the rows in
        # `_ids_to_repeat`, are in no delta.
        self.published_step, self._updates = step, self._tracker.step

        def read_deltas() -> tuple[Published | None, dict[str, Tensor], bool]:
            """Return values for the attributes below on rank 0; of other ranks, they are not used."""
            try:
                if self._axis.rank:
                    return None, {}, False
                last, later, is_behind = self._find_last_delta(step, after)
                return last, _merged(later, unpublished or {}), is_behind or bool(unpublished)
            except DeltaError as error:
                raise ValueError(
                    f"the deltas of {self._folder} cannot be continued: {error} Or move the folder away, and "
                    "export the run again for its servers."
                ) from error

        # `_ids_to_repeat` has, by table, IDs of rows that the next delta must contain even if they do not
        # change any more: servers have other values for them. `_is_behind` is whether servers may have other
        # weights. Both are reset once that delta is published.
        self.last, self._ids_to_repeat, self._is_behind = agreed(
            self._axis, read_deltas, "reading existing deltas"
        )[0]

    def publish(self, step: int, *, event_time: int | None = None) -> None:
        """Write a delta with all weight changes since the last delta.

        Does nothing if the last delta was written at the same ``step``, and has the weights of this step.

        Args:
            step: current training step.
            event_time: time of the latest event that the model was trained on, in microseconds since 1970
                (UTC), from which servers compute how old their weights are; None: unknown.

        Raises:
            CheckpointError: the delta cannot be written; raised on every rank. The next delta then contains
                the changes.
        """
        if self.is_current(step):
            return
        number = self.last.number + 1 if self.last is not None else 1
        rows_path, dense_path = (self._folder / delta_name(number, kind) for kind in KINDS)
        # Read before the export: rows changed later belong to the next delta.
        updates = self._tracker.step
        changed = self._tracker.export(rows_path, since=self._updates, also=self._ids_to_repeat)
        # Collective, so outside ``finish``, in which only rank 0 has work.
        whole = self._untracked_weights()

        def finish() -> Published | None:
            """Write the delta's other files on rank 0, and return a reference to the delta.

            Other ranks write nothing, and return None.
            """
            if self._axis.rank:
                return None
            write_tensors(dense_path, whole)
            values = {
                "format": FORMAT,
                "number": number,
                "run": self._run,
                "since": self.published_step,
                "step": step,
                "event_time": event_time,
                "rows": changed.rows,
                "sha256": {path.name: sha256_of(path) for path in (rows_path, dense_path)},
                "previous": self.last.digest if self.last is not None else "",
                "tracked": sorted(self._tracker.names),
                "whole": sorted(whole),
            }
            if changed.evicted:
                values["gone"] = changed.evicted
            # Written last, because servers see the delta as soon as its JSON file exists.
            write_durably(self._folder / delta_name(number), sealed(values))
            return read_record(self._folder, number).published

        self.last = agreed(self._axis, finish, "publishing a delta")[0]
        # Only after success. After a failure, the next delta starts from the same step and has the same rows.
        self.published_step, self._updates, self._ids_to_repeat, self._is_behind = step, updates, {}, False

    def is_current(self, step: int) -> bool:
        """Return whether the deltas have all changes up to a training step."""
        return step == self.published_step and not self._is_behind

    def unpublished_ids(self) -> dict[str, Tensor]:
        """Return the IDs whose changes since the last delta are in no delta, by table name. Collective.

        A checkpoint stores them, so that servers get these changes from a run that continues from it.

        Raises:
            ValueError: the model was resharded; raised on every rank.
        """
        return _merged(self._tracker.changed_ids(self._updates), self._ids_to_repeat)

    def remove_before(self, seconds: float, retained: Published) -> None:
        """Remove this run's deltas that are older than a time. Not collective: rank 0 removes them.

        Files that cannot be removed are kept until the next call.

        Args:
            seconds: time in seconds since 1970.
            retained: this delta and all later ones are kept.
        """
        if self._axis.rank:
            return
        for number in delta_numbers(self._folder):
            record_path = self._folder / delta_name(number)
            try:
                if number >= retained.number or record_path.stat().st_mtime >= seconds:
                    return
                # A record with its checksum and our name proves that this run wrote the delta.
                if read_record(self._folder, number).run != self._run:
                    continue
                # The record last: without it, the other files would never be found.
                names = [delta_name(number, kind) for kind in KINDS]
                remove_named(self._folder, [*names, record_path.name])
            except (OSError, DeltaError) as error:
                _log.warning("delta %d is not removed: %s", number, error)

    def _find_last_delta(
        self, step: int, after: Published | None
    ) -> tuple[Published | None, dict[str, Tensor], bool]:
        """Find the last delta in the folder, and the rows which the next delta must repeat.

        A resumed run may start from weights that are older than the last delta. Servers may have applied the
        later deltas already. The next delta must then contain all rows in the later deltas, so that the
        servers get the run's values.

        Args:
            step: training step of the weights.
            after: last delta contained in the weights; None: unknown.

        Returns:
            The last delta, or None if no delta exists; the distinct IDs in later deltas by table name; and
            whether there are later deltas.

        Raises:
            DeltaError: a delta after ``after`` is missing or damaged.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        records = delta_records(self._folder)
        if after is not None:
            later = [record for record in records if record.number > after.number]
            # Numbers are consecutive, so a gap shows that a delta is missing.
            if later and later[-1].number - after.number != len(later):
                raise DeltaError(
                    f"some deltas from {after.number + 1} to {later[-1].number} are missing, but servers "
                    "may have applied them. Restore them."
                )
        else:
            # Without a reference, compare training steps.
            later = [record for record in records if record.step > step]
        ids: dict[str, list[Tensor]] = {}
        for record in later:
            delta = read_delta(self._folder, record)
            for name, rows in [*((n, r) for n, (r, _) in delta.rows.items()), *delta.evicted.items()]:
                ids.setdefault(name, []).append(rows)
        last = records[-1].published if records else None
        if after is not None and (last is None or last.number < after.number):
            # The user removed deltas from the folder, but servers with these deltas wait for the next number.
            last = after
        return last, {name: torch.cat(tensors).unique() for name, tensors in ids.items()}, bool(later)

    def _untracked_weights(self) -> dict[str, Tensor]:
        """Return all parameters and buffers except tracked tables, as full CPU tensors. Collective."""
        tracked = set(self._tracker.names)
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        tensors = {}
        for name, tensor in named:
            if name not in tracked:
                # `full_tensor` of a DTensor is collective. All ranks have the same names in the same order.
                full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                tensors[name] = full.detach().cpu().contiguous()
        return tensors


def _merged(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the distinct IDs of both arguments by table name, ascending."""
    parts = {name: [ids[name] for ids in (first, second) if name in ids] for name in {**first, **second}}
    return {name: torch.cat(tensors).unique() for name, tensors in parts.items()}
