"""Synthetic clicks on drifting items: raw 64-bit IDs that are replaced over time, and three ways to map them
to rows.
"""

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
from meshrec.tables.hashed.keys import LRU, Hashed

Rows = Literal["keys", "hashing_trick", "vocabulary"]


@dataclass(frozen=True, kw_only=True)
class Items:
    """Feature values whose raw IDs are replaced periodically.

    Raw IDs are 64-bit hashes. A new ID has a new click rate, not predictable from earlier samples.

    Args:
        lifetime: samples until a value gets a new raw ID. Values change at different moments.
        seed: seed for raw IDs.
        first: first sample number.
        max_rows: rows for the hashing trick; None: keep raw IDs.
        known: vocabulary per feature, as ascending raw IDs: rows from 1 on; other IDs have row 0.
    """

    lifetime: int
    seed: int
    first: int = 0
    max_rows: int | None = None
    vocabularies: tuple[Ints, ...] = ()

    def raw(self, ids: Ints, key: int, times: Ints) -> Ints:
        """Return raw IDs for values.

        Args:
            ids: values [n, ids per feature].
            key: feature number.
            times: sample numbers [n].
        """
        values = mix(ids.astype(np.uint64), seed=(self.seed << 20) + 2 * key)
        whole = np.uint64(self.lifetime)
        # The offset from the hash staggers replacements, so that not all values change in the same sample.
        moments = (times[:, None] + self.first).astype(np.uint64) + (values >> np.uint64(11)) % whole
        generations: UInt64s = moments // whole
        raw: Ints = mix(values + generations, seed=(self.seed << 20) + 2 * key + 1).view(np.int64)
        return raw

    def rows(self, raw: Ints, key: int) -> Ints:
        """Return model inputs for raw IDs: the IDs themselves, or rows of a vocabulary or hash."""
        if self.vocabularies:
            vocabulary = self.vocabularies[key]
            at = np.minimum(np.searchsorted(vocabulary, raw), len(vocabulary) - 1)
            return np.where(vocabulary[at] == raw, at + 1, 0)
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
    """Draw clicks in time order on drifting items, with a planted `Teacher`.

    Training reads the samples in order, followed by validation and test samples. There is no ``best_auc``:
    the click rate of a new item is unpredictable.

    Args:
        rows: mapping from raw IDs to rows. ``"keys"``: keys of hashed tables; ``"hashing_trick"``: hashes
            modulo ``max_rows``, so IDs share rows; ``"vocabulary"``: the most frequent IDs in the first tenth
            of the training samples have rows, others share one.
        max_rows: rows per table.
        lifetime: samples until an item is replaced.
        num_samples: training samples.
        num_test: validation samples, and test samples.
        num_features: features f0, f1, ...
        num_values: simultaneous items per feature.
        num_dense: dense columns.
        exponent: Zipf exponent.
        signal: teacher logit's standard deviation.
        seed: random seed.
        keys: hashed key options; None: ``Hashed(max_rows=max_rows, evict=LRU())``.

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
        items = replace(
            items, vocabularies=_vocabulary(source(items, -(-num_samples // 10), 0), max_rows - 1)
        )
    train = source(items, num_samples, 0)
    later = [replace(items, first=num_samples + turn * num_test) for turn in range(2)]
    held_out = [source(items, num_test, 1 + turn) for turn, items in enumerate(later)]
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
    """Return the most frequent raw IDs per feature, ascending."""
    blocks: Sequence[int] = range(len(source.block_sizes))
    samples = [source.block(block)[0] for block in blocks]
    vocabularies = []
    for key in range(len(source.keys)):
        ids = np.concatenate([block.ids[key].values for block in samples])
        values, counts = np.unique(ids, return_counts=True)
        vocabularies.append(np.sort(values[np.argsort(-counts, kind="stable")[:size]]))
    return tuple(vocabularies)
