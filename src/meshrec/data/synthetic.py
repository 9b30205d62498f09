"""Synthetic click data in any size, drawn from a known model, the teacher.

`synthetic_clicks` has a known best possible AUC. In `drifting_clicks`, items are replaced over time. Random
numbers are seeded by the block number, so any rank can generate any block at any time, and nothing is stored.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from meshrec.data.dataset import Dataset, Feature, RowsOfFile
from meshrec.data.faults import DataError
from meshrec.data.hashing import UInt64s, mix, to_range
from meshrec.data.order import Stream, check_seed, generator
from meshrec.data.samples import Floats, Ints, Ragged, Samples, Shape
from meshrec.data.streaming import Source, StreamReader
from meshrec.metrics.areas import area_under_curve
from meshrec.tables.hashed.keys import LRU, Hashed

_BLOCK = 4096
"""Samples per block. Random numbers are drawn per block, so another size would draw other samples."""
# Logit variance shares of single IDs, dense values and ID pairs. Pairs take longest to learn: with a larger
# share, a few million samples would not suffice.
_ID_SHARE, _DENSE_SHARE, _PAIR_SHARE = 0.75, 0.2, 0.05

Doubles = npt.NDArray[np.float64]
Rows = Literal["keys", "hashing_trick", "vocabulary"]
"""How `drifting_clicks` maps raw IDs to table rows."""


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """Known click probability model, from which labels are drawn.

    The model is a factorization machine (Rendle, 2010), which DLRM and DeepFM can express. Its logit is a sum
    of four parts: the bias, a value per ID, a linear function of the dense values, and a product of two
    factors per pair of features. Values and factors are hashes of the ID, so no table is stored.

    Args:
        seed: seed for values, factors and dense weights.
        bias: mean logit.
        signal: logit standard deviation. A larger one makes clicks more predictable.
    """

    seed: int
    bias: float
    signal: float

    def probabilities(self, dense: Floats, ids: Sequence[Ints]) -> Doubles:
        """Return the click probability for n samples, float64 [n].

        Args:
            dense: dense values, [n, num_dense].
            ids: IDs per feature, [n, IDs per bag].
        """
        num, num_keys = len(dense), len(ids)
        single, total, squares = np.zeros(num), np.zeros(num), np.zeros(num)
        for key, key_ids in enumerate(ids):
            scale = key_ids.shape[1] ** -0.5
            single += scale * self._uniform(key_ids, 2 * key).sum(1)
            factor = scale * self._uniform(key_ids, 2 * key + 1).sum(1)
            total += factor
            squares += factor**2
        # The sum over all pairs, in linear time.
        pairs = (total**2 - squares) / 2
        logit = np.sqrt(_ID_SHARE / max(num_keys, 1)) * single
        logit += np.sqrt(_PAIR_SHARE / max(num_keys * (num_keys - 1) / 2, 1)) * pairs
        if dense.shape[1]:
            weights = generator(self.seed, Stream.TEACHER).standard_normal(dense.shape[1])
            logit += np.sqrt(_DENSE_SHARE) * (dense @ (weights / np.linalg.norm(weights)))
        return 1 / (1 + np.exp(-self.bias - self.signal * logit))  # type: ignore[no-any-return]

    def _uniform(self, ids: Ints, stream: int) -> Doubles:
        """Return a pseudo-random value per ID, from a uniform distribution with mean 0 and variance 1.

        Args:
            stream: another number gives independent values.
        """
        hashes = mix(ids.astype(np.uint64), seed=(self.seed << 20) + stream)
        return ((hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53 - 0.5) * 12**0.5


@dataclass(kw_only=True, eq=False)
class ClickSource(Source):
    """Source of synthetic clicks: features are random, and labels are drawn from a teacher.

    Args:
        num_samples: sample count.
        num_embeddings: number of distinct values per feature. Without ``drift``, the values are table rows.
        ids_per_feature: IDs per bag.
        num_dense: dense columns, with standard normal values.
        exponent: Zipf exponent for ID frequencies.
        seed: seed for the samples.
        teacher: click probability model.
        split: number that distinguishes training, validation and test data. Sources with different numbers
            have different samples.
        drift: maps values to raw IDs that change over time, and raw IDs to model inputs; None: the values
            are the model inputs.
    """

    num_samples: int
    num_embeddings: Sequence[int]
    ids_per_feature: int = 1
    num_dense: int
    exponent: float
    seed: int
    teacher: Teacher
    split: int = 0
    drift: "Items | None" = None

    def __post_init__(self) -> None:
        self.keys = tuple(f"f{key}" for key in range(len(self.num_embeddings)))
        self.shape = Shape(self.num_dense, len(self.keys))

    @property
    def files(self) -> Sequence[RowsOfFile]:
        """A single name to which row numbers refer. No such file exists."""
        return [RowsOfFile("synthetic_clicks", 0, self.num_samples)]

    @property
    def block_sizes(self) -> Ints:
        """Rows per block."""
        sizes = np.full(-(-self.num_samples // _BLOCK), _BLOCK, dtype=np.int64)
        # The last block may be smaller. The slice also works without any block.
        sizes[-1:] = (self.num_samples - 1) % _BLOCK + 1
        return sizes

    def column(self, block: int, name: str) -> Any:
        """Raise DataError, because synthetic clicks have no columns."""
        raise DataError(f"made-up clicks have no column {name!r}: they are read from no file.")

    @override
    def windows(self, block: int, first: int, size: int) -> Generator[Samples, None, None]:
        """Draw a block's samples, and yield them in windows; see `Source.windows`."""
        # Random numbers are drawn for the whole block, so earlier windows are drawn as well.
        samples, _ = self.block(block)
        num = len(samples.labels)
        for start in range(first * size, num, size):
            yield samples.part(start, min(start + size, num))

    def block(self, block: int) -> tuple[Samples, Doubles]:
        """Return the samples in a block, and their click probabilities by the teacher, [n]."""
        num = min(_BLOCK, self.num_samples - block * _BLOCK)
        rng = generator(self.seed, Stream.SAMPLES, self.split, block)
        dense = rng.standard_normal((num, self.num_dense), dtype=np.float32)
        shape = (num, self.ids_per_feature)
        ids = [zipf(rng.random(shape), rows, self.exponent) for rows in self.num_embeddings]
        if self.drift is not None:
            times = np.arange(num) + block * _BLOCK
            ids = [self.drift.raw(key_ids, key, times) for key, key_ids in enumerate(ids)]
        probabilities = self.teacher.probabilities(dense, ids)
        # Drawn before raw IDs are mapped to rows, so labels do not depend on the mapping.
        labels = (rng.random(num) < probabilities).astype(np.float32)
        if self.drift is not None:
            ids = [self.drift.rows(key_ids, key) for key, key_ids in enumerate(ids)]
        offsets = np.arange(num + 1, dtype=np.int64) * self.ids_per_feature
        return Samples(
            dense, labels, tuple(Ragged(key_ids.ravel(), offsets) for key_ids in ids)
        ), probabilities


@dataclass(frozen=True, kw_only=True)
class Items:
    """Raw IDs for the values of features. Over time, every value gets new raw IDs, as a shop replaces items.

    A raw ID is a 64-bit hash. A new raw ID has a new click rate, which earlier samples do not reveal.

    Args:
        lifetime: samples after which a value gets a new raw ID. Values change at different times.
        seed: seed for the raw IDs.
        first: time of the source's first sample, in samples since the first training sample. Training data
            has 0, and validation and test data follow it.
        max_rows: rows to which raw IDs are hashed; None: no hashing.
        vocabularies: a vocabulary per feature: ascending raw IDs, which have the rows from 1 on. Other raw
            IDs have row 0. Empty: no vocabulary.
    """

    lifetime: int
    seed: int
    first: int = 0
    max_rows: int | None = None
    vocabularies: tuple[Ints, ...] = ()

    def raw(self, ids: Ints, key: int, times: Ints) -> Ints:
        """Return the raw IDs that feature values have in the given samples, int64 [n, IDs per bag].

        Args:
            ids: values of the feature, [n, IDs per bag].
            key: feature number.
            times: sample numbers, counted from ``first``, [n].
        """
        values = mix(ids.astype(np.uint64), seed=(self.seed << 20) + 2 * key)
        whole = np.uint64(self.lifetime)
        # The offset from the hash staggers replacements, so not all values change in the same sample.
        moments = (times[:, None] + self.first).astype(np.uint64) + (values >> np.uint64(11)) % whole
        generations: UInt64s = moments // whole
        raw: Ints = mix(values + generations, seed=(self.seed << 20) + 2 * key + 1).view(np.int64)
        return raw

    def rows(self, raw: Ints, key: int) -> Ints:
        """Return the model inputs for raw IDs of the feature number ``key``.

        These are rows in a vocabulary, rows from hashing, or the raw IDs themselves.
        """
        if self.vocabularies:
            vocabulary = self.vocabularies[key]
            at = np.minimum(np.searchsorted(vocabulary, raw), len(vocabulary) - 1)
            return np.where(vocabulary[at] == raw, at + 1, 0)
        return raw if self.max_rows is None else to_range(mix(raw.view(np.uint64)), self.max_rows)


def zipf(uniform: Doubles, num_rows: int, exponent: float) -> Ints:
    """Draw IDs in ``[0, num_rows)`` by Zipf's law.

    The frequency of the r-th most frequent ID is about proportional to ``r ** -exponent``. Frequent IDs are
    spread over the table, not at its start.

    Args:
        uniform: uniform random values in [0, 1), with any shape.
        num_rows: rows of the table.
        exponent: Zipf exponent.

    Returns:
        IDs, int64, with the shape of ``uniform``.
    """
    # Invert the distribution function of the continuous law on [1, num_rows + 1).
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
    """Create a dataset with synthetic clicks, drawn from a known click probability model, a `Teacher`.

    ``Dataset.best_auc`` is the AUC of the known probabilities on the validation data. No model can be better
    except by chance.

    Args:
        num_samples: training samples.
        num_validation: validation samples. 0: no best AUC.
        num_test: test samples.
        num_features: features with IDs, named f0, f1, ...
        num_embeddings: rows of every embedding table, or a list with an entry per feature.
        ids_per_feature: IDs per bag.
        num_dense: dense columns, with standard normal values.
        exponent: Zipf exponent for ID frequencies.
        signal: the teacher's logit standard deviation. A larger one makes clicks more predictable.
        bias: the teacher's mean logit.
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

    train = ClickSource(
        num_samples=num_samples,
        num_embeddings=sizes,
        ids_per_feature=ids_per_feature,
        num_dense=num_dense,
        exponent=exponent,
        seed=seed,
        teacher=teacher,
    )
    # The same teacher and ID distributions, but other random numbers.
    validation = replace(train, num_samples=num_validation, split=1)

    def held_out(source: ClickSource) -> StreamReader | None:
        if not source.num_samples:
            return None
        return StreamReader(source, seed=seed, shuffle=False, window=_BLOCK)

    return Dataset(
        name="synthetic_clicks",
        features=tuple(
            Feature(name=key, num_embeddings=rows, average_length=float(ids_per_feature))
            for key, rows in zip(train.keys, sizes, strict=True)
        ),
        num_dense=num_dense,
        train=StreamReader(train, seed=seed, window=_BLOCK, lanes=lanes),
        validation=held_out(validation),
        test=held_out(replace(train, num_samples=num_test, split=2)),
        item="f0",
        best_auc=_best_auc(validation) if num_validation else None,
    )


def _best_auc(source: ClickSource) -> float | None:
    """Return the AUC of the teacher's probabilities on all samples; None if all labels are equal."""
    blocks = [source.block(block) for block in range(len(source.block_sizes))]
    labels = np.concatenate([samples.labels for samples, _ in blocks])
    probabilities = np.concatenate([chances for _, chances in blocks])
    return area_under_curve(torch.from_numpy(probabilities), torch.from_numpy(labels))


def drifting_clicks(
    *,
    rows: Rows = "keys",
    max_rows: int = 2000,
    lifetime: int = 100_000,
    num_samples: int = 400_000,
    num_test: int = 50_000,
    num_features: int = 2,
    num_values: int = 1000,
    num_dense: int = 2,
    exponent: float = 0.8,
    signal: float = 2.0,
    seed: int = 0,
    keys: Hashed | None = None,
) -> Dataset:
    """Create a dataset with synthetic clicks on items that are replaced over time.

    Clicks are drawn from a known model, a `Teacher`. Samples are in time order, and are not shuffled:
    training samples come first, then validation samples, then test samples. There is no ``best_auc``,
    because the click rate of a new item is unpredictable.

    Args:
        rows: how raw IDs are mapped to table rows. "keys": the tables are hashed tables, which assign rows.
            "hashing_trick": raw IDs are hashed to ``max_rows`` rows, which they share. "vocabulary": the most
            frequent IDs in the first tenth of the training samples have a row each, and other IDs share one.
        max_rows: rows per table.
        lifetime: samples after which an item is replaced.
        num_samples: training samples.
        num_test: validation samples, and as many test samples.
        num_features: features with IDs, named f0, f1, ...
        num_values: items per feature at any time.
        num_dense: dense columns, with standard normal values.
        exponent: Zipf exponent for item frequencies.
        signal: the teacher's logit standard deviation.
        seed: random seed.
        keys: hashed table options, for "keys"; None: ``Hashed(max_rows=max_rows, evict=LRU())``.

    Raises:
        ValueError: a size is out of range.
    """
    check_seed(seed)
    sizes = {"num_samples": num_samples, "num_test": num_test, "num_features": num_features}
    sizes |= {"num_values": num_values, "lifetime": lifetime, "max_rows": max_rows - 1}
    if bad := [name for name, size in sizes.items() if size < 1]:
        raise ValueError(f"{bad[0]} must be at least {2 if bad[0] == 'max_rows' else 1}.")
    drift = Items(lifetime=lifetime, seed=seed, max_rows=max_rows if rows == "hashing_trick" else None)
    train = ClickSource(
        num_samples=num_samples,
        num_embeddings=[num_values] * num_features,
        num_dense=num_dense,
        exponent=exponent,
        seed=seed,
        teacher=Teacher(seed=seed, bias=-1.0, signal=signal),
        drift=drift,
    )
    if rows == "vocabulary":
        # From the first tenth only, because a vocabulary cannot contain items that appear later.
        first_tenth = replace(train, num_samples=-(-num_samples // 10))
        drift = replace(drift, vocabularies=_frequent_ids(first_tenth, max_rows - 1))
        train = replace(train, drift=drift)

    def held_out(split: int) -> StreamReader:
        # Items continue to be replaced in the held-out samples.
        later = replace(drift, first=num_samples + (split - 1) * num_test)
        source = replace(train, num_samples=num_test, split=split, drift=later)
        return StreamReader(source, seed=seed, shuffle=False)

    keys = (keys or Hashed(max_rows=max_rows, evict=LRU())) if rows == "keys" else None
    return Dataset(
        name="drifting_clicks",
        features=tuple(Feature(name=name, num_embeddings=max_rows, keys=keys) for name in train.keys),
        num_dense=num_dense,
        train=StreamReader(train, seed=seed, shuffle=False),
        validation=held_out(1),
        test=held_out(2),
    )


def _frequent_ids(source: ClickSource, size: int) -> tuple[Ints, ...]:
    """Return the ``size`` most frequent raw IDs of a source, ascending, in an array per feature."""
    samples = [source.block(block)[0] for block in range(len(source.block_sizes))]
    vocabularies = []
    for key in range(len(source.keys)):
        ids = np.concatenate([block.ids[key].values for block in samples])
        values, counts = np.unique(ids, return_counts=True)
        vocabularies.append(np.sort(values[np.argsort(-counts, kind="stable")[:size]]))
    return tuple(vocabularies)
