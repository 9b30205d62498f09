"""Progress of a training run, which is stored in checkpoints."""

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from meshrec.checkpoint import Hold, Published, load, read_manifest
from meshrec.data import Position, streams

_POINT_SECONDS = 1800
"""Minimum distance of two checkpoints that are kept for a roll-back, in event time."""


class RestorePoint(NamedTuple):
    """A checkpoint that is kept for a roll-back, with what must be kept to continue from it.

    Attributes:
        step: step of the checkpoint.
        event_time: time of the newest event before it, in microseconds since 1970.
        position: position in the stream.
        published: last delta that the weights contain, as a list; None: there is none.
    """

    step: int
    event_time: int
    position: dict[str, Any]
    published: list[Any] | None


class RunProgress:
    """Progress of a run, whatever its data: steps, samples, training time, and the last published delta.

    Attributes:
        step: number of finished steps.
        num_samples: training samples so far, over all ranks, without skipped damaged rows.
        seconds: training time in seconds, over all starts of the run.
        event_time: time of the newest event so far on any rank, in microseconds since 1970; None: unknown.
        published: last delta written for servers; None before the first. A delta is a set of files with the
            weights changed since the previous delta.
        published_step: step at the last delta, which is written before every checkpoint. It is an earlier
            step than that of the checkpoint if deltas are held back, or could not be written.
        unpublished: IDs of the rows changed since ``published_step``, by table; see `DeltaPublisher`.
        hold: since when and why deltas are held back; None: they are published.
        restore_points: checkpoints that are kept for a roll-back, ascending; empty except on streams.
        start_options: model options returned by `ModelConfig.start`; empty if no weights were fitted.
    """

    def __init__(self) -> None:
        self.step = 0
        self.num_samples = 0
        self.seconds = 0.0
        self.event_time: int | None = None
        self.published: Published | None = None
        self.published_step = 0
        self.unpublished: dict[str, Tensor] = {}
        self.hold: Hold | None = None
        self.restore_points: list[RestorePoint] = []
        self.start_options: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as plain values."""
        return {
            "step": self.step,
            "num_samples": self.num_samples,
            "seconds": self.seconds,
            "published": None if self.published is None else list(self.published),
            "published_step": self.published_step,
            "unpublished": self.unpublished,
            "hold": None if self.hold is None else list(self.hold),
            "start_options": self.start_options,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state from ``state_dict``."""
        self.step, self.num_samples = int(state["step"]), int(state["num_samples"])
        self.seconds = float(state["seconds"])
        published = state.get("published")  # earlier releases did not keep it
        self.published = None if published is None else Published(*published)
        # Earlier releases kept none of these.
        self.published_step = int(state.get("published_step", self.step))
        self.unpublished, hold = dict(state.get("unpublished", {})), state.get("hold")
        self.hold = None if hold is None else Hold(*hold)
        self.start_options = dict(state.get("start_options", {}))


class Progress(RunProgress):
    """Progress of a run over epochs.

    Attributes:
        position: epoch, and number of samples read in this epoch, including skipped rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.position = Position()

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
        # A list instead of a tuple, because a checkpoint stores plain values.
        return {**super().state_dict(), "position": list(self.position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state from ``state_dict``."""
        super().load_state_dict(state)
        self.position = Position(*(int(value) for value in state["position"]))


class StreamProgress(RunProgress):
    """Progress of a run over a stream.

    Attributes:
        position: position in the stream; None: the start.
        alarms: text of each alarm that lasts, by metric; see `meshrec.train.alarms`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.position: streams.Position | None = None
        self.alarms: dict[str, str] = {}

    def add_restore_point(self, window_seconds: float) -> None:
        """Add the current step to the restore points, unless the last one is recent, and drop old ones.

        The newest point from before the window, and all later points are kept.

        Args:
            window_seconds: age that a checkpoint must have for a roll-back, in event time.
        """
        if self.event_time is None or self.position is None:
            return
        points, end = self.restore_points, self.event_time - round(1e6 * window_seconds)
        points = [point for point in points if point.event_time <= end][-1:] + [
            point for point in points if point.event_time > end
        ]
        if not points or self.event_time - points[-1].event_time >= 1e6 * _POINT_SECONDS:
            published = None if self.published is None else list(self.published)
            points.append(RestorePoint(self.step, self.event_time, self.position, published))
        self.restore_points = points

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as plain values."""
        return {
            **super().state_dict(),
            "position": self.position,
            "event_time": self.event_time,
            "alarms": dict(self.alarms),
            "restore_points": [list(point) for point in self.restore_points],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state from ``state_dict``."""
        super().load_state_dict(state)
        self.position, self.event_time = state["position"], state["event_time"]
        # Earlier releases kept none of these.
        self.alarms = dict(state.get("alarms", {}))
        self.restore_points = [RestorePoint(*point) for point in state.get("restore_points", [])]


def origin_of(checkpoint: Path) -> dict[str, Any]:
    """Return where a checkpoint's weights come from, for the manifest of a package.

    Returns:
        ``step``, ``checkpoint`` (name of the checkpoint folder), and ``published`` (the last delta that the
        weights contain; None: none).
    """
    manifest, progress = read_manifest(checkpoint), RunProgress()
    if "progress" in manifest.values:  # earlier releases did not store it with the best weights
        load(checkpoint, {"progress": progress})
    return {"step": manifest.step, "checkpoint": checkpoint.name, "published": progress.published}
