"""Synthetic clicks from a planted teacher: any number of samples, with a known best AUC.

Every block of samples uses random numbers seeded by its block number, so any part can be generated at any
time, on any rank, without storage.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from meshrec.data.dataset import Dataset, Feature, RowsOfFile
from meshrec.data.faults import DataError
from meshrec.data.hashing import mix
from meshrec.data.order import Stream, check_seed, generator
from meshrec.data.samples import Floats, Ints, Ragged, Samples, Shape
from meshrec.data.streaming import Source, StreamReader
from meshrec.metrics.areas import area_under_curve

_BLOCK = 4096
# Logit variance shares of single IDs, dense values and ID pairs. Pairs take longest to learn: with a larger
# share, a few million samples would not suffice.
_ID_SHARE, _DENSE_SHARE, _PAIR_SHARE = 0.75, 0.2, 0.05

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """P(click) = sigmoid(bias + contributions of all IDs, dense values, and pairs of IDs).

    An ID contributes a value, and the products of a factor with the factors of other features' IDs: a
    factorization machine (Rendle, 2010), which DLRM and DeepFM can express. Values and factors are hashes of
    the ID, so there are no tables.

    Args:
        seed: teacher seed.
        bias: mean logit.
        signal: logit standard deviation. Larger means more predictable clicks.
    """

    seed: int
    bias: float
    signal: float

    def probabilities(self, dense: Floats, ids: Sequence[Ints]) -> Doubles:
        """Return click probabilities [n].

        Args:
            dense: [n, num_dense].
            ids: per key, [n, ids per feature].
        """
        num, num_keys = len(dense), len(ids)
        single, total, squares = np.zeros(num), np.zeros(num), np.zeros(num)
        for key, key_ids in enumerate(ids):
            scale = key_ids.shape[1] ** -0.5
            single += scale * self._uniform(key_ids, 2 * key).sum(1)
            factor = scale * self._uniform(key_ids, 2 * key + 1).sum(1)
            total += factor
            squares += factor**2
        pairs = (total**2 - squares) / 2
        logit = np.sqrt(_ID_SHARE / max(num_keys, 1)) * single
        logit += np.sqrt(_PAIR_SHARE / max(num_keys * (num_keys - 1) / 2, 1)) * pairs
        if dense.shape[1]:
            weights = generator(self.seed, Stream.TEACHER).standard_normal(dense.shape[1])
            logit += np.sqrt(_DENSE_SHARE) * (dense @ (weights / np.linalg.norm(weights)))
        return 1 / (1 + np.exp(-self.bias - self.signal * logit))  # type: ignore[no-any-return]

    def _uniform(self, ids: Ints, stream: int) -> Doubles:
        """Return uniform values with mean 0 and variance 1."""
        hashes = mix(ids.astype(np.uint64), seed=(self.seed << 20) + stream)
        return ((hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53 - 0.5) * 12**0.5


class ClickSource(Source):
    """Blocks of synthetic clicks.

    Args:
        num_samples: total samples.
        num_embeddings: rows per table.
        ids_per_feature: IDs per bag.
        num_dense: standard normal dense columns.
        exponent: Zipf exponent.
        seed: sample seed.
        split: part of the data.
        teacher: determines the clicks.
        drift: maps IDs to raw IDs that change over time, and raw IDs to rows; None: no change.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        num_embeddings: Sequence[int],
        ids_per_feature: int,
        num_dense: int,
        exponent: float,
        seed: int,
        split: int,
        teacher: Teacher,
        drift: "Drift | None" = None,
    ) -> None:
        self._num_samples = num_samples
        self._num_embeddings = list(num_embeddings)
        self._ids_per_feature = ids_per_feature
        self._num_dense = num_dense
        self._exponent = exponent
        self._seed, self._split = seed, split
        self._teacher = teacher
        self._drift = drift
        self.keys = tuple(f"f{key}" for key in range(len(num_embeddings)))
        self.shape = Shape(num_dense, len(self.keys))

    @property
    def files(self) -> Sequence[RowsOfFile]:
        """A single display name for row numbers; no such file exists."""
        return [RowsOfFile("synthetic_clicks", 0, self._num_samples)]

    @property
    def block_sizes(self) -> Ints:
        """Rows per block."""
        sizes = np.full(-(-self._num_samples // _BLOCK), _BLOCK, dtype=np.int64)
        sizes[-1:] = (self._num_samples - 1) % _BLOCK + 1
        return sizes

    def column(self, block: int, name: str) -> Any:
        """Raise DataError, because synthetic clicks have no columns."""
        raise DataError(f"made-up clicks have no column {name!r}: they are read from no file.")

    def windows(self, block: int, first: int, size: int) -> Generator[Samples, None, None]:
        """Draw the block, and cut it into windows.

        Args:
            block: block number.
            first: first window.
            size: rows per window.
        """
        samples, _ = self.block(block)
        num = len(samples.labels)
        for start in range(first * size, num, size):
            yield samples.part(start, min(start + size, num))

    def block(self, block: int) -> tuple[Samples, Doubles]:
        """Return a block's samples, and the teacher's probabilities."""
        num = min(_BLOCK, self._num_samples - block * _BLOCK)
        rng = generator(self._seed, Stream.SAMPLES, self._split, block)
        dense = rng.standard_normal((num, self._num_dense), dtype=np.float32)
        shape = (num, self._ids_per_feature)
        ids = [zipf(rng.random(shape), rows, self._exponent) for rows in self._num_embeddings]
        if self._drift is not None:
            times = np.arange(num) + block * _BLOCK
            ids = [self._drift.raw(key_ids, key, times) for key, key_ids in enumerate(ids)]
        probabilities = self._teacher.probabilities(dense, ids)
        labels = (rng.random(num) < probabilities).astype(np.float32)
        if self._drift is not None:
            ids = [self._drift.rows(key_ids, key) for key, key_ids in enumerate(ids)]
        offsets = np.arange(num + 1, dtype=np.int64) * self._ids_per_feature
        return Samples(
            dense, labels, tuple(Ragged(key_ids.ravel(), offsets) for key_ids in ids)
        ), probabilities


class Drift(Protocol):
    """Conversion of IDs to raw IDs that change over time."""

    def raw(self, ids: Ints, key: int, times: Ints) -> Ints:
        """Return a feature's raw IDs.

        Args:
            ids: [n, ids per feature].
            key: feature number.
            times: sample numbers, [n].
        """

    def rows(self, raw: Ints, key: int) -> Ints:
        """Return model inputs for raw IDs, in the same shape."""


def zipf(uniform: Doubles, num_rows: int, exponent: float) -> Ints:
    """Return IDs in ``[0, num_rows)`` with Zipf frequencies: the r-th most frequent has about r ** -exponent.

    Inverts the distribution function of the continuous law on ``[1, num_rows + 1)``. Frequent IDs are spread
    over the table.

    Args:
        uniform: uniform random values in [0, 1).
        num_rows: rows of the table.
        exponent: Zipf exponent.
    """
    if exponent == 1:
        ranks = np.exp(uniform * np.log(num_rows + 1.0))
    else:
        power = 1 - exponent
        ranks = (1 + uniform * ((num_rows + 1.0) ** power - 1)) ** (1 / power)
    ids = np.minimum(ranks.astype(np.int64) - 1, num_rows - 1)
    # A multiplier coprime to num_rows makes the map a permutation.
    step = next(number for number in (2_654_435_761, 40_503, 1) if math.gcd(number, num_rows) == 1)
    spread: Ints = (ids * step + num_rows // 3) % num_rows
    return spread


def synthetic_clicks(
    *,
    num_samples: int = 1_000_000,
    num_validation: int = 100_000,
    num_test: int = 100_000,
    num_features: int = 4,
    num_embeddings: int | Sequence[int] = 200,
    ids_per_feature: int = 1,
    num_dense: int = 4,
    exponent: float = 1.2,
    signal: float = 1.5,
    bias: float = -1.0,
    seed: int = 0,
    lanes: int = 8,
) -> Dataset:
    """Create a dataset with a planted `Teacher`; ``best_auc`` is the AUC of its validation probabilities.

    Args:
        num_samples: training samples.
        num_validation: validation samples. 0: no best AUC.
        num_test: test samples.
        num_features: number of keys f0, f1, ...
        num_embeddings: rows per table, or a list.
        ids_per_feature: IDs per bag.
        num_dense: standard normal dense columns.
        exponent: Zipf exponent for IDs.
        signal: teacher logit's standard deviation.
        bias: mean teacher logit.
        seed: seed for samples, teacher and shuffle.
        lanes: see `meshrec.data.StreamReader`.

    Raises:
        ValueError: a size is out of range.

    Example::

        data = synthetic_clicks(num_samples=100, num_validation=50, num_test=0)
        batch = next(iter(data.train.batches(32)))
        assert batch.labels.shape == (32,)
        assert batch.sparse.keys() == ["f0", "f1", "f2", "f3"]
    """
    check_seed(seed)
    sizes = [num_embeddings] * num_features if isinstance(num_embeddings, int) else list(num_embeddings)
    if len(sizes) != num_features or num_features < 1 or min(sizes) < 1:
        raise ValueError(f"num_embeddings must be >= 1 for each of {num_features} features, got {sizes}.")
    at_least_1, at_least_0 = (num_samples, ids_per_feature), (num_validation, num_test, num_dense)
    if min(at_least_1) < 1 or min(at_least_0) < 0 or exponent <= 0:
        raise ValueError(
            "num_samples and ids_per_feature must be >= 1, num_validation, num_test and num_dense >= 0, "
            f"exponent > 0; got {num_samples=}, {ids_per_feature=}, {num_validation=}, {num_test=}, "
            f"{num_dense=}, {exponent=}."
        )
    teacher = Teacher(seed=seed, bias=bias, signal=signal)

    def source(split: int, num: int) -> ClickSource:
        return ClickSource(
            num_samples=num,
            num_embeddings=sizes,
            ids_per_feature=ids_per_feature,
            num_dense=num_dense,
            exponent=exponent,
            seed=seed,
            split=split,
            teacher=teacher,
        )

    train = source(0, num_samples)

    def held_out(split: int, num: int) -> StreamReader | None:
        return StreamReader(source(split, num), seed=seed, shuffle=False, window=_BLOCK) if num else None

    return Dataset(
        name="synthetic_clicks",
        features=tuple(
            Feature(name=key, num_embeddings=rows, average_length=float(ids_per_feature))
            for key, rows in zip(train.keys, sizes, strict=True)
        ),
        num_dense=num_dense,
        train=StreamReader(train, seed=seed, window=_BLOCK, lanes=lanes),
        validation=held_out(1, num_validation),
        test=held_out(2, num_test),
        item="f0",
        best_auc=_best_auc(source(1, num_validation)) if num_validation else None,
    )


def _best_auc(source: ClickSource) -> float | None:
    """Return the AUC of the teacher's probabilities; None if all labels are equal."""
    blocks = [source.block(block) for block in range(len(source.block_sizes))]
    labels = np.concatenate([samples.labels for samples, _ in blocks])
    probabilities = np.concatenate([chances for _, chances in blocks])
    return area_under_curve(torch.from_numpy(probabilities), torch.from_numpy(labels))
