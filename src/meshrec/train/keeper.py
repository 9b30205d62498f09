"""Files from which others continue: checkpoints for a resumed run, deltas for servers, the best weights."""

from collections.abc import Callable
from typing import Any

from meshrec.checkpoint import CheckpointError, CheckpointManager, DeltaPublisher
from meshrec.checkpoint.stored import ObjectStore, StoredCheckpoints
from meshrec.model_parallel import DistributedModelParallel
from meshrec.train.building import Built
from meshrec.train.checkpoints import Checkpoints
from meshrec.train.progress import Progress
from meshrec.train.ranks import Ranks
from meshrec.train.recipe import Training
from meshrec.train.run_folder import DELTAS, RunFolder
from meshrec.train.stopping import EarlyStopping
from meshrec.train.weights import BestWeights


class Keeper:
    """The checkpoints, deltas and best weights of a run. All methods are collective.

    A delta precedes every checkpoint and every stored best model. Servers that start from one of them, and a
    run that resumes from it, then miss no step.

    Args:
        built: the model and its optimizers.
        progress, early: the other parts of a checkpoint.
        training: the intervals.
        ranks: the ranks, from `join`.
        folder: the folder of the run; None: nothing is stored, and the best weights are in memory.
        keep: save checkpoints. If not, each rank keeps its part of the best weights in memory.
        store: where checkpoints go; if none, into the folder.
        tell: prints a line for the user; called on every rank.

    Attributes:
        folder: the folder of the run, or None.
        state: everything that a checkpoint stores, by name: the model, its optimizers, the progress, early
            stopping. Learning rates and the order of samples are functions of the progress.
        failures: the error of each checkpoint that could not be saved.
        is_saved: whether the final state is on disk; True if nothing is stored.
    """

    def __init__(
        self,
        built: Built,
        progress: Progress,
        early: EarlyStopping,
        *,
        training: Training,
        ranks: Ranks,
        folder: RunFolder | None,
        keep: bool = True,
        store: ObjectStore | None = None,
        tell: Callable[[str], None],
    ) -> None:
        self.folder, self._progress, self._tell = folder, progress, tell
        self.state: dict[str, Any] = {
            "model": built.model,
            "table_optimizer": built.tables,
            "dense_optimizer": built.dense,
            "progress": progress,
            "early_stopping": early,
        }
        self.failures: list[str] = []
        self.is_saved = True
        self._publishes = folder is not None and training.publish_every is not None
        self._publisher: DeltaPublisher | None = None
        self._checkpoints: Checkpoints | None = None
        best: CheckpointManager | StoredCheckpoints | None = None
        if folder is not None and keep:
            self._checkpoints = Checkpoints(folder, training, ranks, self.state, tell, store=store)
            self.failures, best = self._checkpoints.failures, self._checkpoints.best
        self._best = BestWeights(built.model, best)
        self._kept_step: int | None = None

    def resume(self) -> bool:
        """Load the newest intact checkpoint; return False if there is none."""
        if self._checkpoints is None:
            return False
        optimizers = (self.state["table_optimizer"], self.state["dense_optimizer"])
        groups = [group for each in optimizers for group in each.param_groups]
        options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        found = self._checkpoints.resume()
        for group, values in zip(groups, options, strict=True):
            group.update(values)  # the recipe's, not those of the checkpoint
        return found

    def start(self) -> None:
        """Start to record touched rows for deltas, if the recipe publishes any."""
        model = self.state["model"]
        if self._publishes and self.folder is not None:
            assert isinstance(model, DistributedModelParallel)
            path, progress = self.folder.path, self._progress
            self._publisher = DeltaPublisher(
                model, path / DELTAS, run=path.name, step=progress.step, after=progress.published
            )

    def publish(self) -> None:
        """Write a delta. If that fails, it is reported, and the next delta contains the same rows."""
        if self._publisher is not None:
            try:
                self._publisher.publish(self._progress.step)
            except CheckpointError as error:
                self._tell(f"no delta was published: {error}")
            self._progress.published = self._publisher.last

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint of this step is due."""
        return self._checkpoints is not None and self._checkpoints.is_due(step)

    def save(self) -> None:
        """Save a checkpoint in the background."""
        assert self._checkpoints is not None
        self.publish()
        self._checkpoints.save(self._progress.step)

    def keep_best(self) -> None:
        """Store the current weights as the best of the run."""
        self.publish()
        try:
            self._best.keep(self._progress)
            self._kept_step = self._progress.step
        except CheckpointError as error:
            assert self._checkpoints is not None
            self._checkpoints.failed(error)

    def restore_best(self) -> int | None:
        """Load the best weights; return their step, or None if the current ones are kept."""
        step = self._progress.step
        if self._kept_step == step:
            return None
        found = self._best.restore()
        return None if found == step else found

    def finish(self) -> None:
        """Save the final state, after a last delta for servers."""
        self.publish()
        if self._checkpoints is not None:
            self.is_saved = self._checkpoints.finish(self._progress.step)

    def wait(self) -> None:
        """Wait for the checkpoints that are being written."""
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def latest(self) -> str | None:
        """Return the path of the newest checkpoint, once all are written; None if there is none."""
        self.wait()
        return None if self._checkpoints is None else self._checkpoints.latest()
