"""Progress of training, as stored in checkpoints."""

from pathlib import Path
from typing import Any

from meshrec.checkpoint import Published, load, read_manifest
from meshrec.data import Position


class Progress:
    """Step and sample counters, data position, and seconds of training.

    Attributes:
        step: finished steps.
        num_samples: samples trained on, over all ranks, without skipped damaged rows.
        seconds: seconds of training.
        position: epoch, and number of samples read in it, with skipped rows.
        published: last delta written for servers; None: none. A delta precedes every checkpoint, so it covers
            all steps up to the checkpoint.
        start_options: result of `ModelConfig.start`.
    """

    def __init__(self) -> None:
        self.step = 0
        self.num_samples = 0
        self.seconds = 0.0
        self.position = Position()
        self.published: Published | None = None
        self.start_options: dict[str, Any] = {}

    def advance(self, num_samples: int, samples_per_epoch: int) -> None:
        """Count a step, and move the data position by ``num_samples``, over all ranks."""
        self.step += 1
        epoch, sample = self.position
        sample += num_samples
        # A position at the end of an epoch is the start of the next.
        self.position = Position(epoch + 1, 0) if sample >= samples_per_epoch else Position(epoch, sample)

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as plain values."""
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
    """Return the origin of a checkpoint's weights: step, checkpoint name, and the last delta included in
    them.
    """
    manifest, progress = read_manifest(checkpoint), Progress()
    if "progress" in manifest.values:  # earlier releases did not store it with the best weights
        load(checkpoint, {"progress": progress})
    return {"step": manifest.step, "checkpoint": checkpoint.name, "published": progress.published}
