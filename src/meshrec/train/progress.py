"""How far training is; a checkpoint keeps it."""

from typing import Any

from meshrec.data import Position


class Progress:
    """Steps, samples, the position in the data, and the seconds that training took.

    ``num_samples`` are those that were trained, over all ranks: rows that were skipped as damaged take a
    place in the data, and so count in the position only.
    """

    def __init__(self) -> None:
        self.step = 0
        self.num_samples = 0
        self.seconds = 0.0
        self.position = Position()

    def advance(self, num_samples: int, samples_per_epoch: int) -> None:
        """After a step of ``num_samples`` places in the data, over all ranks."""
        self.step += 1
        epoch, sample = self.position
        sample += num_samples
        self.position = Position(epoch + 1, 0) if sample >= samples_per_epoch else Position(epoch, sample)

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "step": self.step,
            "num_samples": self.num_samples,
            "seconds": self.seconds,
            "position": list(self.position),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        self.step, self.num_samples = int(state["step"]), int(state["num_samples"])
        self.seconds = float(state["seconds"])
        self.position = Position(*(int(value) for value in state["position"]))
