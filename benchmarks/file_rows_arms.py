"""The model, the batches and the arms of the benchmarks of tables in files.

The IDs follow Zipf's law with exponent 1.05 over shuffled rows of width 64; a tenth of the rows is in memory.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import meshrec
from benchmarks.clicks_model import TABLES, Batch, ClicksLoop, Shape
from meshrec import distributed as md
from meshrec.tables.cached.table import FileTable

WIDTH, EXPONENT, SHARE = 64, 1.05, 0.1
ROW_BYTES = 4 * WIDTH + 4


class Sizes(NamedTuple):
    """The sizes of the model and of its batches."""

    shape: Shape
    warm_up: int
    steps: int

    @property
    def cached(self) -> int:
        """The rows of a table that are in memory."""
        return max(256, int(SHARE * self.shape.num_rows))


# The dense part and the batch of DLRM's published run on Criteo's terabyte, whose rows have this width.
TERABYTE = Shape(
    num_tables=4,
    num_rows=800_000,
    batch=2048,
    bag=2,
    bottom=(512, 256, WIDTH),
    top=(512, 512, 256, 1),
)
SIZES = Sizes(TERABYTE, 6, 10)
TINY = Sizes(Shape(num_tables=2, num_rows=2_000, batch=32, bag=2, bottom=(16, WIDTH), top=(16, 1)), 3, 2)


class Batches:
    """Batches of IDs by Zipf's law, made before anything is timed."""

    def __init__(self, shape: Shape, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        ranks = torch.arange(1, shape.num_rows + 1, dtype=torch.float64)
        self._law = ranks.pow(-EXPONENT).cumsum(0)
        self._rows = torch.randperm(shape.num_rows, generator=generator)
        self._all = []
        for _ in range(count):
            features = meshrec.KeyedJaggedTensor(
                [f"f{t}" for t in range(shape.num_tables)],
                self._drawn(shape.num_tables * shape.batch * shape.bag, generator),
                lengths=torch.full((shape.num_tables * shape.batch,), shape.bag),
            )
            dense = torch.rand(shape.batch, shape.dense_in, generator=generator)
            labels = (torch.rand(shape.batch, generator=generator) < 0.3).float()
            self._all.append(Batch(dense, features, labels))

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._all)

    def ids(self, count: int, seed: int) -> Tensor:
        """Draw some IDs of one table."""
        return self._drawn(count, torch.Generator().manual_seed(seed))

    def _drawn(self, count: int, generator: torch.Generator) -> Tensor:
        drawn = torch.rand(count, generator=generator, dtype=torch.float64) * self._law[-1]
        return self._rows[torch.searchsorted(self._law, drawn).clamp_(max=len(self._rows) - 1)]


class Arm:
    """A model that is trained step by step."""

    def __init__(self, sizes: Sizes, storage: meshrec.FileRows | None, *, ahead: bool) -> None:
        env = md.ShardingEnv.single_process()
        self._loop = ClicksLoop(sizes.shape, env, pipelined=ahead, storage=storage)
        shards = self._loop.model.module.get_submodule(TABLES).built.shards
        self.files = [rows for each in shards.values() for rows in each.tables if isinstance(rows, FileTable)]

    def fill(self, batches: Batches, num_ids: int) -> None:
        """Use rows as training would, until half of the rows of full caches have been replaced."""
        for number, rows in enumerate(self.files):
            turn = 0
            while rows.counts.num_written < len(rows.slot_keys) // 2:
                rows.resolve(batches.ids(num_ids, seed=1000 * number + turn), train=True).pin.wait()
                turn += 1

    def counts(self) -> list[int]:
        """Return the distinct rows of batches that were in memory and that were not, and the rows written."""
        names = ("num_used", "num_read", "num_written")
        return [sum(getattr(rows.counts, name) for rows in self.files) for name in names]

    def run(self, batches: Iterator[Batch], count: int) -> tuple[list[float], list[float]]:
        """Train some steps; return the losses, and seconds."""
        losses, seconds = [], []
        for _ in range(count):
            start = time.perf_counter()
            losses.append(float(self._loop.step(batches)))
            seconds.append(time.perf_counter() - start)
        return losses, seconds
