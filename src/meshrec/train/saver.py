"""Save a run's checkpoints (from which it resumes), deltas (for servers) and best weights."""

from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import finalize

import torch
from torch import Tensor, nn

from meshrec.checkpoint import CheckpointError, CheckpointManager, Hold, Published
from meshrec.checkpoint.finding import BEST, CHECKPOINTS, HOLD
from meshrec.checkpoint.hashed import hashed_targets
from meshrec.checkpoint.matching import Differences
from meshrec.checkpoint.saving import load_matching
from meshrec.durable import make_scratch, remove_scratch
from meshrec.model_parallel import DistributedModelParallel
from meshrec.tables.placeholder import PlaceholderTensor
from meshrec.train.building import BuiltModel
from meshrec.train.progress import RunProgress
from meshrec.train.ranks import Ranks
from meshrec.train.run_folder import DELTAS, RunFolder

if TYPE_CHECKING:
    from meshrec.checkpoint.publishing import DeltaPublisher
    from meshrec.checkpoint.stored import ObjectStore

T = TypeVar("T")


class CheckpointSaver:
    """Saver of a run's checkpoints, deltas and best weights. All methods are collective.

    A delta is a set of files with the weights changed since the previous delta. Servers apply deltas to
    update their model. A delta is written before every checkpoint and before every save of the best weights.
    The saved weights then end with a delta, and a server with these weights can apply all later deltas. If
    the delta is held back or fails, the checkpoint has the IDs whose changes are in no delta.

    A failed save, for example on a full disk, is reported but does not end the run. Older checkpoints remain,
    and the next save tries again.

    Args:
        built: the model and the optimizers.
        progress: progress of the run, which checkpoints contain.
        state: further entries of a checkpoint by name, such as early stopping.
        every: steps between checkpoints, for `is_due`; None: only the caller decides.
        keep_last: number of checkpoints to keep.
        publishes: whether to write deltas.
        ranks: the ranks, from `join`.
        folder: run folder; None: nothing is stored.
        keep: whether to save checkpoints. Without checkpoints or a folder, every rank keeps a copy of its
            best weights in memory. Models with hashed tables or rows in files use a scratch folder instead.
        store: object store for checkpoints; None: they are saved in the run folder.
        tell: prints a line for the user; called on every rank.

    Attributes:
        folder: run folder, or None.
        state: entries of a checkpoint by name: model, optimizers, progress and others. Learning rates and
            sample order need no entry, because they follow from the progress.
        failures: error messages from failed saves.
        is_saved: whether the final state is saved; True if nothing is to be stored. Set by `finish`.
    """

    def __init__(
        self,
        built: BuiltModel,
        progress: RunProgress,
        state: Mapping[str, Any],
        *,
        every: int | None,
        keep_last: int,
        publishes: bool,
        ranks: Ranks,
        folder: RunFolder | None,
        keep: bool = True,
        store: "ObjectStore | None" = None,
        tell: Callable[[str], None],
    ) -> None:
        self.folder, self._progress, self._tell = folder, progress, tell
        self._group, self._is_first = ranks.control, ranks.is_first
        self.state: dict[str, Any] = {
            "model": built.model,
            "table_optimizer": built.tables,
            "dense_optimizer": built.dense,
            "progress": progress,
            **state,
        }
        self.failures: list[str] = []
        self.is_saved = True
        # Whether the run publishes deltas. `start_deltas` creates the publisher, because a resume must
        # have loaded the progress before.
        self._publishes = folder is not None and publishes
        self._publisher: DeltaPublisher | None = None
        # The last delta that `take_published` has returned.
        self._reported: Published | None = None
        # Progress in the newest checkpoints, oldest first. One more than are kept, because the newest may not
        # be complete.
        self._kept: deque[dict[str, Any]] = deque(maxlen=keep_last + 1)
        self._every = every
        self._saved: int | None = None
        """Step of the last successful save or load; None after a failure."""
        self._attempted: int | None = None
        """Step of the last save that was started."""
        # Manager of the checkpoints; None if no checkpoints are saved.
        self._manager: CheckpointManager | None = None
        best: CheckpointManager | None = None
        # Source and target of copies of small run files, so that another host can continue. On rank 0 only.
        self._mirror: tuple[Path, ObjectStore] | None = None
        if folder is not None and keep:
            self._manager = _make_manager(folder, CHECKPOINTS, store, keep_last, ranks)
            best = _make_manager(folder, BEST, store, 1, ranks)
            if store is not None and ranks.is_first:
                from meshrec.train.stored_run import RUN_FILES

                self._mirror = (folder.path, store.under(RUN_FILES))
        elif any(isinstance(parameter, PlaceholderTensor) for parameter in built.model.parameters()):
            # Placeholder parameters have no tensor data: an in-memory copy would miss their rows.
            path = ranks.broadcast(make_scratch("meshrec-best") if ranks.is_first else None)
            if ranks.is_first:
                finalize(self, remove_scratch, path)
            best = CheckpointManager(path, keep_last=1)
        self._best = BestWeights(built.model, best)
        # Step of the best weights saved by this process. Set by `save_best`; not restored by a resume.
        self._best_step: int | None = None

    def resume(self) -> bool:
        """Load the newest intact checkpoint. Return whether there is one."""
        manager = self._manager
        if manager is None:
            return False
        self._saved = self._load(lambda: manager.load_latest(self.state))
        return self._saved is not None

    def _load(self, load: Callable[[], T]) -> T:
        """Load a checkpoint with a function, and return its result. The options of optimizers stay."""
        # Loading overwrites the optimizer options. Restore them, because the current recipe's options apply.
        optimizers = (self.state["table_optimizer"], self.state["dense_optimizer"])
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        result = load()
        for group, values in zip(groups, options, strict=True):
            group.update(values)
        return result

    def load_matching(
        self, weights: Path, last: Path, *, fresh_tables: Collection[str], tables_only: bool
    ) -> Differences:
        """Load another run's weights and optimizer state as far as they fit.

        Args:
            weights: checkpoint with the weights.
            last: checkpoint with the optimizer state.
            fresh_tables: names of tables that keep their initial values.
            tables_only: whether all tensors other than tables keep their initial values.
        """
        options: dict[str, Any] = {
            "fresh_tables": fresh_tables,
            "tables_only": tables_only,
            "group": self._group,
        }
        names = ("model", "table_optimizer", "dense_optimizer")
        # Weights and optimizer state of hashed tables are the same rows, so they are loaded together.
        state = {name: self.state[name] for name in names}
        differences = load_matching(last, state, **options)
        if weights != last:
            model = {"model": self.state["model"]}
            load_matching(weights, model, **options)
            differences.fresh_state += [f"{path}.weight" for path in hashed_targets(self.state["model"])]
        return differences

    def start_deltas(self) -> None:
        """Start to record changed rows for deltas, if the run publishes deltas.

        To be called after a resume, and before the first training step.
        """
        model = self.state["model"]
        if self._publishes and self.folder is not None:
            assert isinstance(model, DistributedModelParallel)
            path, progress = self.folder.path, self._progress
            from meshrec.checkpoint.publishing import DeltaPublisher

            self._publisher = DeltaPublisher(
                model,
                path / DELTAS,
                run=path.name,
                step=progress.published_step,
                after=progress.published,
                unpublished=progress.unpublished,
            )
            self._reported = progress.published

    def hold(self, reason: str) -> None:
        """Hold back all deltas until `release`, and keep the last checkpoint for servers that start."""
        if self._progress.hold is None:
            # Only a complete checkpoint can be kept.
            self.wait()
            # After a failed save, an older checkpoint is the last.
            complete = [] if self._manager is None else self._manager.steps()
            last = self._saved if self._saved is not None else next(reversed(complete), None)
            self._progress.hold = Hold(last, reason)
        self.show_hold()

    def release(self) -> None:
        """Publish deltas again. The next one has all changes since the last one."""
        self._progress.hold = None
        self.show_hold()

    def show_hold(self) -> None:
        """Write or remove the file that says whether the run holds back its weights."""
        hold = self._progress.hold
        self._retain()
        if self.folder is not None and self._is_first:
            if hold is None:
                self.folder.discard(self.folder.path / HOLD)
            else:
                self.folder.write_json(HOLD, hold._asdict(), seal=True)

    def _retain(self) -> None:
        """Tell the manager which old checkpoints are needed."""
        if self._manager is not None:
            hold, points = self._progress.hold, self._progress.restore_points
            steps = [None if hold is None else hold.step, *(point.step for point in points)]
            self._manager.retained = frozenset(step for step in steps if step is not None)

    def publish(self) -> None:
        """Write a delta, if the run publishes deltas and does not hold them back.

        A failure is reported to the user, and does not end the run. The next delta then also has the rows of
        the failed delta.
        """
        if self._publisher is not None and self._progress.hold is None:
            try:
                self._publisher.publish(self._progress.step, event_time=self._progress.event_time)
            except CheckpointError as error:
                self._tell(f"no delta was published: {error}")
            # Stored in checkpoints, so that a resumed run knows which deltas its weights contain.
            self._progress.published = self._publisher.last

    def _publish_before_save(self) -> None:
        """Publish, and record in the progress which changes are in no delta."""
        self.publish()
        publisher, progress = self._publisher, self._progress
        if publisher is None:
            progress.published_step, progress.unpublished = progress.step, {}
        else:
            progress.published_step, progress.unpublished = publisher.published_step, {}
            if not publisher.is_current(progress.step):
                progress.unpublished = publisher.unpublished_ids()

    def take_published(self) -> Published | None:
        """Return the last delta, if it was published since the last call."""
        published = self._progress.published
        is_new = self._publisher is not None and published != self._reported
        self._reported = published
        return published if is_new else None

    @property
    def oldest_progress(self) -> dict[str, Any] | None:
        """Progress of the oldest checkpoint from which the run may continue; None: unknown.

        It is unknown after a start, while there may be checkpoints of an earlier start. If the checkpoint is
        kept for a roll-back, the result has the fields of `RestorePoint`.
        """
        if len(self._kept) != self._kept.maxlen:
            return None
        points = [point._asdict() for point in self._progress.restore_points]
        return min([self._kept[0], *points], key=lambda progress: int(progress["step"]))

    def remove_deltas_before(self, seconds: float) -> None:
        """Remove deltas of this run that are older than a time, and that all kept checkpoints contain."""
        published = (self.oldest_progress or {}).get("published")
        # During a hold, servers may start from a checkpoint that is older than those in `_kept`.
        if self._publisher is not None and published is not None and self._progress.hold is None:
            self._publisher.remove_before(seconds, Published(*published))

    @property
    def is_current(self) -> bool:
        """Whether the newest checkpoint has the current step."""
        return self._saved == self._progress.step

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint must be saved after this step."""
        return self._manager is not None and self._every is not None and step % self._every == 0

    def save(self) -> None:
        """Start to save a checkpoint in the background."""
        assert self._manager is not None
        # Before the save, so that the checkpoint ends with a delta; see the class.
        self._publish_before_save()
        self._save(self._manager.async_save)

    def save_best(self) -> None:
        """Save the current weights as the run's best weights.

        Raises:
            CheckpointError: the weights cannot be saved, and the run has no checkpoints to fall back to.
        """
        self._publish_before_save()
        # A run with checkpoints goes on, and its summary tells the failure. Without checkpoints, nothing else
        # would keep the best weights.
        try:
            self._best.copy_weights(self._progress)
            self._best_step = self._progress.step
        except CheckpointError as error:
            if self._manager is None:
                raise
            self._record_failure(error)

    def restore_best(self) -> int | None:
        """Load the best weights into the model, and return their step.

        Return None if the current weights are the best, or if no best weights were saved.
        """
        step = self._progress.step
        # The current weights are already the best.
        if self._best_step == step:
            return None
        restored = self._best.restore()
        return None if restored == step else restored

    def finish(self) -> None:
        """Write a last delta for servers, and save the final state unless it is saved already."""
        self._publish_before_save()
        if self._manager is not None:
            self.wait()
            # After `wait`: a background save that failed has reset `_saved`.
            # The background save may already have saved this step.
            if self._saved != self._progress.step:
                self._save(self._manager.save)
            self.is_saved = self._saved == self._progress.step

    def wait(self) -> None:
        """Wait until the background save has ended. A failure is recorded and reported."""
        if self._manager is not None:
            try:
                self._manager.wait()
            except CheckpointError as error:
                self._record_failure(error)

    def latest(self) -> str | None:
        """Wait for the background save, and return the path of the newest checkpoint, or None without any."""
        self.wait()
        path = None if self._manager is None else self._manager.latest()
        return None if path is None else str(path)

    def _save(self, save: Callable[[int, dict[str, Any]], object]) -> None:
        """Save a checkpoint, and record success or failure."""
        try:
            # A background save has only started when this returns. If it fails later, `wait` or the next save
            # raises, and `_record_failure` resets `_saved`.
            self._attempted = self._progress.step
            save(self._progress.step, self.state)
            self._saved = self._progress.step
            self._kept.append({**self._progress.state_dict(), "unpublished": {}})
            if self._mirror is not None:
                from meshrec.train.stored_run import upload_run

                upload_run(*self._mirror)
        except CheckpointError as error:
            self._record_failure(error)

    def _record_failure(self, error: CheckpointError) -> None:
        """Record a failed save, and tell the user."""
        self._saved = None
        self._kept.clear()
        points = self._progress.restore_points
        self._progress.restore_points = [point for point in points if point.step != self._attempted]
        self.failures.append(str(error))
        self._tell(f"no checkpoint was saved: {error}")


class BestWeights:
    """Copy of a model's weights at the best step. With a manager, all methods are collective.

    Args:
        model: the model whose weights are copied.
        manager: checkpoint manager, which stores the copy on disk, so that a resumed run can load it. If
            None, every rank keeps its part of the weights in memory.
    """

    def __init__(self, model: nn.Module, manager: CheckpointManager | None = None) -> None:
        self._model, self._manager = model, manager
        # In-memory copy, without a manager; allocated by the first `copy_weights`.
        self._copy: dict[str, Tensor] = {}
        # Step of the in-memory copy; None without a copy.
        self._step: int | None = None

    def copy_weights(self, progress: RunProgress) -> None:
        """Copy the model's current weights, and drop the previous copy.

        Raises:
            CheckpointError: the weights cannot be written; raised on every rank. The previous copy remains.
        """
        if self._manager is not None:
            self._manager.save(progress.step, {"model": self._model, "progress": progress})
            # Best weights of later steps may exist if the run was resumed from an earlier checkpoint.
            self._manager.remove_after(progress.step)
            return
        # Allocate once, and reuse the memory for every later best step.
        if not self._copy:
            self._copy = {name: torch.empty_like(tensor) for name, tensor in self._tensors().items()}
        for name, tensor in self._tensors().items():
            self._copy[name].copy_(tensor)
        self._step = progress.step

    def restore(self) -> int | None:
        """Load the best weights into the model, and return their step; None without a copy."""
        if self._manager is not None:
            return self._manager.load_latest({"model": self._model})
        for name, tensor in self._tensors().items() if self._copy else ():
            tensor.copy_(self._copy[name])
        return self._step

    def _tensors(self) -> dict[str, Tensor]:
        """Return the model's parameters and buffers, by name."""
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        return {name: tensor.detach() for name, tensor in named}


def _make_manager(
    folder: RunFolder, name: str, store: "ObjectStore | None", keep_last: int, ranks: Ranks
) -> CheckpointManager:
    """Create the manager for a run's checkpoints or best weights."""
    # Files on their way to a store are in a hidden folder, so that no command takes them for checkpoints.
    path = folder.path / name if store is None else folder.path / ".staged" / name
    stored = None if store is None else store.under(name)
    return CheckpointManager(path, keep_last=keep_last, group=ranks.control, store=stored)
