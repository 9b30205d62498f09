"""One step's samples."""

from dataclasses import dataclass

import torch
from torch import Tensor

from meshrec.sparse import KeyedJaggedTensor


@dataclass
class Batch:
    """B samples: what a model reads, and what it should say.

    ``DLRMTrain`` takes it as it is (``dense_features`` and ``sparse_features`` are its words).
    """

    dense: Tensor
    """[B, num_dense] float32."""
    sparse: KeyedJaggedTensor
    """B bags per key."""
    labels: Tensor
    """[B] float32, or [B, L] where there are several; NaN where the data has none."""
    rows: Tensor | None = None
    """[B] int64: which row of the data each sample is, see :attr:`meshrec.data.Reader.files`. On the CPU."""
    weights: Tensor | None = None
    """[B] float32: how much each sample counts in the loss; None: all alike."""

    @property
    def dense_features(self) -> Tensor:
        """The same as ``dense``."""
        return self.dense

    @property
    def sparse_features(self) -> KeyedJaggedTensor:
        """The same as ``sparse``."""
        return self.sparse

    def __len__(self) -> int:
        return self.labels.shape[0]

    def padded(self, size: int) -> "Batch":
        """With samples added at the end, up to ``size``: their dense values are 0, bags empty, labels NaN.

        ``rows`` stays as it is: it tells how many samples there are.
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
        """On another device; ``non_blocking`` does not wait for copies from pinned memory."""
        return Batch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
            self.rows,
            None if self.weights is None else self.weights.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> "Batch":
        """In pinned host memory, from which copies to a GPU do not block."""
        weights = None if self.weights is None else self.weights.pin_memory()
        return Batch(
            self.dense.pin_memory(), self.sparse.pin_memory(), self.labels.pin_memory(), self.rows, weights
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that ``stream`` uses the memory."""
        self.dense.record_stream(stream)
        self.sparse.record_stream(stream)
        self.labels.record_stream(stream)
        if self.weights is not None:
            self.weights.record_stream(stream)
