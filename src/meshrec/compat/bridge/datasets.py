"""Random batches with TorchRec's values for a seed, and TorchRec's column names for public data sets."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from meshrec.compat.bridge.streamable import Pipelineable
from meshrec.sparse import KeyedJaggedTensor

# Column names and sizes of the Criteo and MovieLens files.
INT_FEATURE_COUNT = 13
CAT_FEATURE_COUNT = 26
DAYS = 24
TOTAL_TRAINING_SAMPLES = 4_195_197_692
"""Criteo Terabyte rows in days 0 to 22."""
# TorchRec's names for files and columns, which programs import.
DEFAULT_LABEL_NAME = "label"
DEFAULT_INT_NAMES = [f"int_{index}" for index in range(INT_FEATURE_COUNT)]
DEFAULT_CAT_NAMES = [f"cat_{index}" for index in range(CAT_FEATURE_COUNT)]
DEFAULT_COLUMN_NAMES = [DEFAULT_LABEL_NAME, *DEFAULT_INT_NAMES, *DEFAULT_CAT_NAMES]

RATINGS_FILENAME = "ratings.csv"
MOVIES_FILENAME = "movies.csv"
DEFAULT_RATINGS_COLUMN_NAMES = ["userId", "movieId", "rating", "timestamp"]
DEFAULT_MOVIES_COLUMN_NAMES = ["movieId", "title", "genres"]


@dataclass
class Batch(Pipelineable):
    """Input batch for TorchRec's models: dense features [B, num_dense], sparse features, and labels [B]."""

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        return Batch(
            self.dense_features.to(device, non_blocking=non_blocking),
            self.sparse_features.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        self.dense_features.record_stream(stream)
        self.sparse_features.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self) -> "Batch":
        """Return the batch in pinned host memory."""
        return Batch(
            self.dense_features.pin_memory(), self.sparse_features.pin_memory(), self.labels.pin_memory()
        )


class RandomRecDataset(IterableDataset[Batch]):
    """Dataset of random batches, with TorchRec's values for a seed.

    IDs are uniform, dense features are normal, and labels are 0 or 1.

    Args:
        keys: names of the sparse features.
        batch_size: samples per batch.
        hash_size: exclusive upper limit for IDs of all features (default 100).
        hash_sizes: limits per feature, instead of ``hash_size``.
        ids_per_feature: maximum bag length of all features (default 2).
        ids_per_features: maximum bag lengths per feature, instead of ``ids_per_feature``.
        num_dense: number of dense features.
        manual_seed: seed for reproducible batches.
        num_batches: number of batches; None: endless.
        num_generated_batches: number of batches to generate in advance and repeat. If negative, every batch
            is generated on demand.
        min_ids_per_feature: minimum bag length of all features (default: ``ids_per_feature``, or 0).
        min_ids_per_features: minimum bag lengths per feature, instead of ``min_ids_per_feature``.
    """

    def __init__(
        self,
        keys: Sequence[str],
        batch_size: int,
        hash_size: int | None = None,
        hash_sizes: Sequence[int] | None = None,
        ids_per_feature: int | None = None,
        ids_per_features: Sequence[int] | None = None,
        num_dense: int = 50,
        manual_seed: int | None = None,
        num_batches: int | None = None,
        num_generated_batches: int = 10,
        min_ids_per_feature: int | None = None,
        min_ids_per_features: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        min_length = ids_per_feature if min_ids_per_feature is None else min_ids_per_feature
        self._keys, self._batch_size, self._num_dense = list(keys), batch_size, num_dense
        self._hash_sizes = _by_key(keys, "hash_sizes", hash_sizes, hash_size or 100)
        self._max_lengths = _by_key(keys, "ids_per_features", ids_per_features, ids_per_feature or 2)
        self._min_lengths = _by_key(keys, "min_ids_per_features", min_ids_per_features, min_length or 0)
        self.num_batches = num_batches
        self._generator = None if manual_seed is None else torch.Generator().manual_seed(manual_seed)
        # Kept for the dataset's lifetime: every iterator cycles through the same batches.
        self._batches = [self._make() for _ in range(num_generated_batches)]
        self._generates_on_demand = num_generated_batches < 0

    def __iter__(self) -> Iterator[Batch]:
        new_batches = (self._make() for _ in itertools.count())
        batches = new_batches if self._generates_on_demand else itertools.cycle(self._batches)
        return itertools.islice(batches, self.num_batches)

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError("a RandomRecDataset without num_batches has no end. Give num_batches.")
        return self.num_batches

    def _make(self) -> Batch:
        """Draw a new batch."""
        # The order of draws is TorchRec's: lengths and values by key, dense features, labels.
        values, lengths, draw = [], [], self._generator
        for rows, min_length, max_length in zip(
            self._hash_sizes, self._min_lengths, self._max_lengths, strict=True
        ):
            lengths.append(
                torch.randint(
                    min_length, max_length + 1, (self._batch_size,), dtype=torch.int32, generator=draw
                )
            )
            values.append(torch.randint(0, rows, (int(lengths[-1].sum()),), generator=draw))
        sparse = KeyedJaggedTensor.from_lengths_sync(self._keys, torch.cat(values), torch.cat(lengths))
        dense = torch.randn(self._batch_size, self._num_dense, generator=draw)
        return Batch(dense, sparse, torch.randint(0, 2, (self._batch_size,), generator=draw))


def _by_key(keys: Sequence[str], name: str, given: Sequence[int] | None, default: int) -> list[int]:
    """Return a number per key: the given numbers, or ``default`` for all keys.

    Args:
        given: numbers per key, or None.
        default: number for all keys without ``given``.
    """
    values = [default] * len(keys) if given is None else list(given)
    if len(values) != len(keys):
        raise ValueError(f"{name} needs one number for each of the {len(keys)} keys, got {values}.")
    return values
