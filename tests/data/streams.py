"""What tests of readers share: samples that can be told apart, and ways to look at batches."""

from collections.abc import Generator, Iterable

import numpy as np

from meshrec.data import Batch, Position, Reader, RowsOfFile, Source
from meshrec.data.samples import Ints, Ragged, Samples, Shape


class Numbered(Source):
    """Row i of all has the dense value i, the id i under "one", and i % 3 times the id i under "some"."""

    def __init__(self, block_sizes: list[int]) -> None:
        self.sizes = np.array(block_sizes, dtype=np.int64)
        self.opened: list[int] = []

    keys = ("one", "some")

    @property
    def files(self):
        return [RowsOfFile("numbered", 0, int(self.sizes.sum()))]

    shape = Shape(1, 2)

    def column(self, block: int, name: str):
        raise KeyError(name)

    @property
    def block_sizes(self) -> Ints:
        return self.sizes

    def windows(self, block: int, first: int, size: int) -> Generator[Samples, None, None]:
        self.opened.append(block)
        base, num = int(self.sizes[:block].sum()), int(self.sizes[block])
        for start in range(first * size, num, size):
            rows = base + np.arange(start, min(start + size, num))
            offsets = np.concatenate([[0], np.cumsum(rows % 3)])
            ids = (Ragged(rows, np.arange(len(rows) + 1)), Ragged(np.repeat(rows, rows % 3), offsets))
            yield Samples(rows[:, None].astype(np.float32), (rows % 2).astype(np.float32), ids)


def numbers(batch: Batch) -> list[int]:
    """The numbers of a batch's rows; checks that all parts of it agree."""
    rows = batch.dense[:, 0].long()
    batch.sparse.validate()
    assert batch.labels.tolist() == (rows % 2).tolist()
    assert batch.rows.tolist() == rows.tolist()
    keys = batch.sparse.to_dict()
    assert keys["one"].values().tolist() == rows.tolist()
    assert keys["some"].lengths().tolist() == (rows % 3).tolist()
    assert keys["some"].values().tolist() == rows.repeat_interleave(rows % 3).tolist()
    return rows.tolist()


def epoch(reader: Reader, batch_size: int, world_size: int = 1, position: Position = Position()):  # noqa: B008
    """For each step of the rest of an epoch, the batches of all ranks."""
    ranks = [
        reader.batches(batch_size, position=position, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    return list(zip(*ranks, strict=True))


def covered(steps: Iterable[tuple[Batch, ...]]) -> list[list[int]]:
    """For each step, the numbers of its rows, sorted."""
    return [sorted(number for batch in step for number in numbers(batch)) for step in steps]
