"""Publishing deltas during training: see ``delta_files.py`` for what a delta is."""

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
    delta_records,
    read_delta,
    read_record,
)
from meshrec.durable import sealed, sha256_of, write_durably
from meshrec.model_parallel import DistributedModelParallel


class DeltaPublisher:
    """Writes the deltas of a model during training. All of it is collective.

    Args:
        model: the model, whose fused tables are tracked from now on.
        folder: the folder of the deltas. Existing deltas are continued.
        run: the run's name, which packages of its checkpoints contain as well.
        step: the last step that was trained.
        after: the last delta that the weights contain, as `last` was when they were saved. If None, the rows
            of all published steps after ``step`` are published again.

    Attributes:
        last: the last delta that the current weights contain, once `publish` has returned; None: no delta.

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
        """Write the changes since the last delta; nothing if no step was made.

        Raises:
            CheckpointError: the delta cannot be written; raised on every rank. The next delta then contains
                more.
        """
        if step == self._step:
            return
        number = self.last.number + 1 if self.last is not None else 1
        rows_path, dense_path = (self._folder / delta_name(number, kind) for kind in KINDS)
        updates = self._tracker.step
        changed = self._tracker.export(rows_path, since=self._updates, also=self._owed)
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
                "rows": changed.rows,
                "sha256": {path.name: sha256_of(path) for path in (rows_path, dense_path)},
                "previous": self.last.digest if self.last is not None else "",
                "tracked": sorted(self._tracker.names),
                "whole": sorted(whole),
            }
            if changed.gone:
                said["gone"] = changed.gone
            write_durably(self._folder / delta_name(number), sealed(said))
            return read_record(self._folder, number).published

        self.last = agreed(self._axis, finish, "publishing a delta")[0]
        self._step, self._updates, self._owed = step, updates, {}

    def _found(self, step: int, after: Published | None) -> tuple[Published | None, dict[str, Tensor]]:
        """Return the last delta, and, by table, the IDs of the rows in deltas that these weights do not
        contain.
        """
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
            delta = read_delta(self._folder, record)
            for name, rows in [*((n, r) for n, (r, _) in delta.rows.items()), *delta.gone.items()]:
                ids.setdefault(name, []).append(rows)
        last = records[-1].published if records else None
        if after is not None and (last is None or last.number < after.number):
            last = after  # deltas were taken away, and whoever has them goes on from there
        return last, {name: torch.cat(each).unique() for name, each in ids.items()}

    def _untracked(self) -> dict[str, Tensor]:
        """Return whole tensors of the weights that are not tracked."""
        tracked = set(self._tracker.names)
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        found = {}
        for name, tensor in named:
            if name not in tracked:
                full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                found[name] = full.detach().cpu().contiguous()
        return found
