"""Samples of a training step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from meshrec.sparse import KeyedJaggedTensor


@dataclass
class Batch:
    """Model inputs and labels for B samples, as tensors.

    The attributes ``dense_features`` and ``sparse_features`` have the names of TorchRec's batches, so
    ``DLRMTrain`` accepts a batch directly.
    """

    dense: Tensor
    """Dense values [B, num_dense], float32."""
    sparse: KeyedJaggedTensor
    """IDs per key, with B bags (lists of IDs) for every key."""
    labels: Tensor
    """Labels [B] float32, or [B, L] for L labels; NaN without labels."""
    rows: Tensor | None = None
    """Row number in the data per sample, [B] int64, always on the CPU; see `meshrec.data.Reader.files`."""
    weights: Tensor | None = None
    """Loss weight per sample, [B] float32; None: all 1."""
    times: Tensor | None = None
    """Event time per sample in microseconds since 1970, [B] int64, always on the CPU; None: unknown."""

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
        """Return the batch padded to ``size`` samples, with dense values 0, empty bags and NaN labels.

        ``rows`` and ``times`` keep their length, the number of real samples.
        """
        num_padding = size - len(self)
        if num_padding <= 0:
            return self
        sparse = self.sparse
        keys = sparse.keys()
        lengths_FB = sparse.lengths().view(len(keys), -1)
        # An empty bag per key and added sample: values stay unchanged, because lengths are stored key by key.
        padded_lengths = torch.nn.functional.pad(lengths_FB, (0, num_padding)).reshape(-1)
        return Batch(
            torch.nn.functional.pad(self.dense, (0, 0, 0, num_padding)),
            KeyedJaggedTensor(
                keys,
                sparse.values(),
                sparse.weights_or_none(),
                lengths=padded_lengths,
                stride=len(self) + num_padding,
            ),
            torch.nn.functional.pad(
                self.labels, (0,) * (2 * self.labels.dim() - 1) + (num_padding,), value=float("nan")
            ),
            self.rows,
            None if self.weights is None else torch.nn.functional.pad(self.weights, (0, num_padding)),
            self.times,
        )

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Return the batch on a device: itself, or a copy.

        Args:
            device: target device.
            non_blocking: do not wait for copies from pinned memory.
        """
        # Row numbers and times are not compared: they stay on the CPU.
        if self.dense.device == self.labels.device == self.sparse.device() == device:
            return self
        return Batch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
            self.rows,
            None if self.weights is None else self.weights.to(device, non_blocking=non_blocking),
            self.times,
        )

    def pin_memory(self) -> "Batch":
        """Copy the batch to pinned host memory, for non-blocking copies to a GPU."""
        # Row numbers and times are not pinned, because they are never copied to a GPU.
        return Batch(
            self.dense.pin_memory(),
            self.sparse.pin_memory(),
            self.labels.pin_memory(),
            self.rows,
            None if self.weights is None else self.weights.pin_memory(),
            self.times,
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the CUDA allocator that ``stream`` uses the tensors, see ``torch.Tensor.record_stream``."""
        self.dense.record_stream(stream)
        self.sparse.record_stream(stream)
        self.labels.record_stream(stream)
        if self.weights is not None:
            self.weights.record_stream(stream)
