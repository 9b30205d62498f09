"""Clicks on items that come and go: raw 64-bit IDs, always new ones, and three ways to give them rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from meshrec.data.dataset import Dataset, Feature
from meshrec.data.hashing import UInt64s, mix, to_range
from meshrec.data.order import check_seed
from meshrec.data.samples import Ints
from meshrec.data.streaming import StreamReader
from meshrec.data.synthetic import ClickSource, Teacher
from meshrec.tables.hashed_keys import LRU, Hashed

Rows = Literal["keys", "hashing_trick", "vocabulary"]


@dataclass(frozen=True, kw_only=True)
class Items:
    """Values of features whose raw IDs are replaced by new ones from time to time.

    Raw IDs are 64-bit hashes. A new ID has a click rate of its own, which no earlier sample reveals.

    Args:
        lifetime: the number of samples after which a value has a new raw ID. Values change at different
            moments.
        seed: the seed of raw IDs.
        first: the number of the first sample.
        max_rows: the rows of the hashing trick; None: raw IDs stay as they are.
        known: for each feature the raw IDs of a vocabulary, ascending: rows from 1 on; others have row 0.
    """

    lifetime: int
    seed: int
    first: int = 0
    max_rows: int | None = None
    known: tuple[Ints, ...] = ()

    def raw(self, ids: Ints, key: int, times: Ints) -> Ints:
        """Return the raw IDs of values in the samples with these numbers."""
        values = mix(ids.astype(np.uint64), seed=(self.seed << 20) + 2 * key)
        whole = np.uint64(self.lifetime)
        moments = (times[:, None] + self.first).astype(np.uint64) + (values >> np.uint64(11)) % whole
        generations: UInt64s = moments // whole
        raw: Ints = mix(values + generations, seed=(self.seed << 20) + 2 * key + 1).view(np.int64)
        return raw

    def rows(self, raw: Ints, key: int) -> Ints:
        """Return the model's input for raw IDs: the IDs themselves, or rows of a vocabulary or a hash."""
        if self.known:
            known = self.known[key]
            at = np.minimum(np.searchsorted(known, raw), len(known) - 1)
            return np.where(known[at] == raw, at + 1, 0)
        return raw if self.max_rows is None else to_range(mix(raw.view(np.uint64)), self.max_rows)


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
    """Draw clicks in the order of time on items that come and go, with a planted `Teacher`.

    Training reads the samples in their order. The validation samples follow, and then those of the test:
    ``best_auc`` is not given, as nobody can know the click rate of an item that has just come.

    Args:
        rows: how raw IDs get rows: ``"keys"``: they are keys of hashed tables; ``"hashing_trick"``: their
            hashes modulo ``max_rows``, so that IDs share rows; ``"vocabulary"``: the most frequent of the
            first tenth of the training samples have a row, all others share one.
        max_rows: the rows of each table.
        lifetime: the number of samples after which an item is replaced.
        num_samples, num_test: the training samples; the validation samples, and as many of the test.
        num_features: the number of features f0, f1, ...
        num_values: the number of items of a feature that are there at a time.
        num_dense: the number of dense columns.
        exponent: the exponent of Zipf's law.
        signal: the standard deviation of the teacher's logit.
        seed: the seed of everything.
        keys: the keys of hashed tables; None: ``Hashed(max_rows=max_rows, evict=LRU())``.

    Raises:
        ValueError: a size is out of range.
    """
    check_seed(seed)
    sizes = {"num_samples": num_samples, "num_test": num_test, "num_features": num_features}
    sizes |= {"num_values": num_values, "lifetime": lifetime, "max_rows": max_rows - 1}
    if bad := [name for name, size in sizes.items() if size < 1]:
        raise ValueError(f"{bad[0]} must be at least {2 if bad[0] == 'max_rows' else 1}.")
    teacher = Teacher(seed=seed, bias=-1.0, signal=signal)

    def source(items: Items, num: int, split: int) -> ClickSource:
        return ClickSource(
            num_samples=num,
            num_embeddings=[num_values] * num_features,
            ids_per_feature=1,
            num_dense=num_dense,
            exponent=exponent,
            seed=seed,
            split=split,
            teacher=teacher,
            drift=items,
        )

    items = Items(lifetime=lifetime, seed=seed)
    if rows == "hashing_trick":
        items = replace(items, max_rows=max_rows)
    elif rows == "vocabulary":
        items = replace(items, known=_vocabulary(source(items, -(-num_samples // 10), 0), max_rows - 1))
    train = source(items, num_samples, 0)
    later = [replace(items, first=num_samples + turn * num_test) for turn in range(2)]
    held_out = [source(each, num_test, 1 + turn) for turn, each in enumerate(later)]
    keys = (keys or Hashed(max_rows=max_rows, evict=LRU())) if rows == "keys" else None
    return Dataset(
        name="drifting_clicks",
        features=tuple(Feature(name=name, num_embeddings=max_rows, keys=keys) for name in train.keys),
        num_dense=num_dense,
        train=StreamReader(train, seed=seed, shuffle=False),
        validation=StreamReader(held_out[0], seed=seed, shuffle=False),
        test=StreamReader(held_out[1], seed=seed, shuffle=False),
    )


def _vocabulary(source: ClickSource, size: int) -> tuple[Ints, ...]:
    """Return the most frequent raw IDs of each feature, ascending."""
    blocks: Sequence[int] = range(len(source.block_sizes))
    samples = [source.block(block)[0] for block in blocks]
    found = []
    for key in range(len(source.keys)):
        ids = np.concatenate([each.ids[key].values for each in samples])
        known, counts = np.unique(ids, return_counts=True)
        found.append(np.sort(known[np.argsort(-counts, kind="stable")[:size]]))
    return tuple(found)
