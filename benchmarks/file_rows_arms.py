"""The model, the batches and the arms of the benchmarks of tables in files.

The IDs follow Zipf's law with exponent 1.05 over shuffled rows of width 64; a tenth of the rows is in memory.
"""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import meshrec
from benchmarks.clicks_model import TABLES, Clicks, ClicksLoop
from meshrec import distributed as md
from meshrec.tables.cached.table import FileTable

WIDTH, EXPONENT, SHARE = 64, 1.05, 0.1
ROW_BYTES = 4 * WIDTH + 4


class Sizes(NamedTuple):
    """The sizes of the model and of its batches."""

    num_tables: int
    num_rows: int
    batch: int
    bag: int
    bottom: list[int]
    top: list[int]
    warm_up: int
    steps: int

    @property
    def cached(self) -> int:
        """The rows of a table that are in memory."""
        return max(256, int(SHARE * self.num_rows))


# The dense part and the batch of DLRM's published run on Criteo's terabyte, whose rows have this width.
SIZES = Sizes(4, 800_000, 2048, 2, [512, 256], [512, 512, 256, 1], 6, 10)
TINY = Sizes(2, 2_000, 32, 2, [16], [16, 1], 3, 2)


def _model(sizes: Sizes, storage: meshrec.FileRows | None) -> Clicks:
    configs = [
        meshrec.EmbeddingBagConfig(
            name=f"t{i}",
            num_embeddings=sizes.num_rows,
            embedding_dim=WIDTH,
            feature_names=[f"f{i}"],
            storage=storage,
        )
        for i in range(sizes.num_tables)
    ]
    tables = meshrec.EmbeddingBagCollection(configs, device="meta")
    return Clicks(tables, [*sizes.bottom, WIDTH], sizes.top)


class Batches:
    """Batches of IDs by Zipf's law, made before anything is timed."""

    def __init__(self, sizes: Sizes, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        ranks = torch.arange(1, sizes.num_rows + 1, dtype=torch.float64)
        law = ranks.pow(-EXPONENT).cumsum(0)
        places = torch.randperm(sizes.num_rows, generator=generator)
        self._all = []
        num_ids = sizes.batch * sizes.bag
        for _ in range(count):
            drawn = torch.rand(sizes.num_tables * num_ids, generator=generator, dtype=torch.float64) * law[-1]
            ids = places[torch.searchsorted(law, drawn).clamp_(max=sizes.num_rows - 1)]
            features = meshrec.KeyedJaggedTensor(
                [f"f{i}" for i in range(sizes.num_tables)],
                ids,
                lengths=torch.full((sizes.num_tables * sizes.batch,), sizes.bag),
            )
            dense = torch.rand(sizes.batch, 13, generator=generator)
            labels = (torch.rand(sizes.batch, generator=generator) < 0.3).float()
            self._all.append((dense, features, labels))

        self.law, self.places, self.ids_per_table = law, places, num_ids

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all)

    def ids(self, count: int, seed: int) -> Tensor:
        """Draw some IDs of one table."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.rand(count, generator=generator, dtype=torch.float64) * self.law[-1]
        return self.places[torch.searchsorted(self.law, drawn).clamp_(max=len(self.places) - 1)]


class Arm:
    """A model that is trained step by step."""

    def __init__(self, sizes: Sizes, storage: meshrec.FileRows | None, *, ahead: bool) -> None:
        env = md.ShardingEnv.single_process()
        self._loop = ClicksLoop(_model(sizes, storage), env, pipelined=ahead)
        shards = self._loop.model.module.get_submodule(TABLES).built.shards  # type: ignore[union-attr]
        self.tables = [rows for each in shards.values() for rows in each.tables]

    def fill(self, batches: Batches) -> None:
        """Use rows as training would, until half of the rows of full caches have been replaced."""
        for number, rows in enumerate(self.files()):
            turn = 0
            while rows.counts.num_written < len(rows.slot_keys) // 2:
                ids = batches.ids(batches.ids_per_table, seed=1000 * number + turn)
                rows.resolve(ids, train=True).pin.wait()  # type: ignore[attr-defined]
                turn += 1

    def files(self) -> list[FileTable]:
        """Return the tables in files."""
        return [each for each in self.tables if isinstance(each, FileTable)]

    def counts(self) -> tuple[int, int, int]:
        """Return the distinct rows of batches that were in memory and that were not, and the rows written."""
        counts = [rows.counts for rows in self.files()]
        return tuple(
            sum(getattr(c, name) for c in counts) for name in ("num_used", "num_read", "num_written")
        )  # type: ignore[return-value]

    def run(self, batches: Iterator[Any], count: int) -> tuple[list[float], list[float]]:
        """Train some steps; return the losses, and seconds."""
        losses, seconds = [], []
        for _ in range(count):
            start = time.perf_counter()
            losses.append(float(self._loop.step(batches)))
            seconds.append(time.perf_counter() - start)
        return losses, seconds
