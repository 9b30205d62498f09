"""Progress of a training run, which is stored in checkpoints."""

from pathlib import Path
from typing import Any

from meshrec.checkpoint import Published, load, read_manifest
from meshrec.data import Position


class Progress:
    """Progress of a training run: step, samples, position in the data, and training time.

    Attributes:
        step: number of finished steps.
        num_samples: training samples so far, over all ranks, without skipped damaged rows.
        seconds: training time in seconds, over all starts of the run.
        position: epoch, and number of samples read in this epoch, including skipped rows.
        published: last delta written for servers; None before the first. A delta is a set of files with the
            weights changed since the previous delta. It is written before every checkpoint, so it contains
            all steps up to the checkpoint.
        start_options: model options returned by `ModelConfig.start`; empty if no weights were fitted.
    """

    def __init__(self) -> None:
        self.step = 0
        self.num_samples = 0
        self.seconds = 0.0
        self.position = Position()
        self.published: Published | None = None
        self.start_options: dict[str, Any] = {}

    def advance(self, num_samples: int, samples_per_epoch: int) -> None:
        """Count a finished step, and advance the position in the data.

        At the end of an epoch, the position becomes the start of the next epoch.

        Args:
            num_samples: number of samples read by all ranks in this step.
            samples_per_epoch: number of samples in an epoch.
        """
        self.step += 1
        epoch, sample = self.position
        sample += num_samples
        # A position at the end of an epoch is the start of the next.
        self.position = Position(epoch + 1, 0) if sample >= samples_per_epoch else Position(epoch, sample)

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as plain values."""
        # Lists instead of tuples, because a checkpoint stores plain values.
        return {
            "step": self.step,
            "num_samples": self.num_samples,
            "seconds": self.seconds,
            "position": list(self.position),
            "published": None if self.published is None else list(self.published),
            "start_options": self.start_options,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state from ``state_dict``."""
        self.step, self.num_samples = int(state["step"]), int(state["num_samples"])
        self.seconds = float(state["seconds"])
        self.position = Position(*(int(value) for value in state["position"]))
        published = state.get("published")  # earlier releases did not keep it
        self.published = None if published is None else Published(*published)
        self.start_options = dict(state.get("start_options", {}))


def origin_of(checkpoint: Path) -> dict[str, Any]:
    """Return where a checkpoint's weights come from, for the manifest of a package.

    Returns:
        ``step``, ``checkpoint`` (name of the checkpoint folder), and ``published`` (the last delta that the
        weights contain; None: none).
    """
    manifest, progress = read_manifest(checkpoint), Progress()
    if "progress" in manifest.values:  # earlier releases did not store it with the best weights
        load(checkpoint, {"progress": progress})
    return {"step": manifest.step, "checkpoint": checkpoint.name, "published": progress.published}
