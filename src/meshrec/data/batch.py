"""The samples of one training step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from meshrec.sparse import KeyedJaggedTensor


@dataclass
class Batch:
    """B samples: the inputs of a model and their labels.

    ``DLRMTrain`` takes a batch as it is: ``dense_features`` and ``sparse_features`` are its names for the
    inputs.
    """

    dense: Tensor
    """Dense values [B, num_dense], float32."""
    sparse: KeyedJaggedTensor
    """B bags per key."""
    labels: Tensor
    """Labels [B] float32, or [B, L] for L labels; NaN if the data has none."""
    rows: Tensor | None = None
    """Row number of each sample in the data, [B] int64 on the CPU; see `meshrec.data.Reader.files`."""
    weights: Tensor | None = None
    """Weight of each sample in the loss, [B] float32; None: all weights are 1."""

    @property
    def dense_features(self) -> Tensor:
        """Alias of ``dense``."""
        return self.dense

    @property
    def sparse_features(self) -> KeyedJaggedTensor:
        """Alias of ``sparse``."""
        return self.sparse

    def __len__(self) -> int:
        return self.labels.shape[0]

    def padded(self, size: int) -> "Batch":
        """Return the batch padded to ``size`` samples, whose dense values are 0, bags empty and labels NaN.

        ``rows`` keeps its length, which is the number of real samples.
        """
        more = size - len(self)
        if more <= 0:
            return self
        sparse = self.sparse
        keys = sparse.keys()
        lengths_FB = sparse.lengths().view(len(keys), -1)
        longer = torch.nn.functional.pad(lengths_FB, (0, more)).reshape(-1)
        return Batch(
            torch.nn.functional.pad(self.dense, (0, 0, 0, more)),
            KeyedJaggedTensor(
                keys, sparse.values(), sparse.weights_or_none(), lengths=longer, stride=len(self) + more
            ),
            torch.nn.functional.pad(
                self.labels, (0,) * (2 * self.labels.dim() - 1) + (more,), value=float("nan")
            ),
            self.rows,
            None if self.weights is None else torch.nn.functional.pad(self.weights, (0, more)),
        )

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Copy the batch to a device. ``non_blocking``: do not wait for copies from pinned memory."""
        return Batch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
            self.rows,
            None if self.weights is None else self.weights.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> "Batch":
        """Copy the batch to pinned host memory, from which copies to a GPU do not block."""
        weights = None if self.weights is None else self.weights.pin_memory()
        return Batch(
            self.dense.pin_memory(), self.sparse.pin_memory(), self.labels.pin_memory(), self.rows, weights
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that ``stream`` uses the memory."""
        self.dense.record_stream(stream)
        self.sparse.record_stream(stream)
        self.labels.record_stream(stream)
        if self.weights is not None:
            self.weights.record_stream(stream)
