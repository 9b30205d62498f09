"""A program that trains tables in files on a disk that becomes full, and then gets more room.

Its argument is a folder. The disk is a file system in memory, mounted below the folder, so the caller must
give this process mounts of its own.
"""

import subprocess
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from file_tables import FileTables, same, whole

from meshrec import checkpoint
from meshrec.optim import RowWiseAdagrad
from meshrec.tables.cached.file import RowFileError

NUM_ROWS, ROWS_PER_STEP = 100_000, 5_000
NAMES = ("a", "b", "c")


class Growing(FileTables):
    """Tables of which each step uses more rows than the one before."""

    def __init__(self):
        configs = {"all": {name: {"num_embeddings": NUM_ROWS, "embedding_dim": 8} for name in NAMES}}
        super().__init__(configs, self._draw, {"rowwise": RowWiseAdagrad(lr=0.1)}, longest=3, cached=(60, 60))
        self._used = 0

    def _draw(self, lengths, generator):
        return (torch.rand(int(lengths.sum()), generator=generator) * self._used).long()

    def step(self, model, number):
        self._used = min(NUM_ROWS, ROWS_PER_STEP * (1 + number))
        self.train(model, [number])


def main():
    folder, tables = Path(sys.argv[1]), Growing()
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "rows", str(disk)], check=True)
    models = side, plain = tables.alone(disk / "rows", cached=60), tables.alone(None)
    for number in range(4):
        for model in models:
            tables.step(model, number)
    state = {"model": side, "tables": side.fused_optimizer}
    checkpoint.save(folder / "before", state)
    expected, number, refusal = whole(side), 4, ""
    while not refusal:
        try:
            tables.step(side, number)
        except RowFileError as error:
            refusal = str(error)
        else:
            tables.step(plain, number)
            number += 1
    assert "no space is left on the disk" in refusal, refusal
    assert "No row is lost" in refusal, refusal
    assert same(whole(side), whole(plain))
    subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
    for later in range(number, number + 4):
        for model in models:
            tables.step(model, later)
    assert same(whole(side), whole(plain))
    checkpoint.load(folder / "before", state)
    assert same(whole(side), expected)
    print(f"step {number} was refused")


if __name__ == "__main__":
    main()
