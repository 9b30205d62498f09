"""Measure a disk as used by table files."""

import time
from pathlib import Path

import torch

from meshrec.tables.cached.file import RowFile, file_in

_WIDTH, _BATCH = 64, 4096


def measure_disk(folder: Path, *, num_rows: int = 500_000, batches: int = 8) -> tuple[float, float]:
    """Measure how many 260-byte records a disk reads and writes per second, at random.

    Args:
        folder: folder on the disk. A file with half a KiB per row is created there, and removed.
        num_rows: the file's row count.
        batches: 4,096-row batches to read, and to write.

    Returns:
        Reads and writes per second.

    Raises:
        RowFileError: full or failing disk.
    """
    path = file_in(folder, "calibration")
    file = RowFile(path, "calibration", [4 * _WIDTH], first_key=0, num_rows=num_rows)
    try:
        step = 1 << 16
        zeros = [torch.zeros(step, _WIDTH)]
        for first in range(0, num_rows, step):
            keys = torch.arange(first, min(first + step, num_rows))
            file.write(keys, zeros, torch.arange(len(keys)))
        generator = torch.Generator().manual_seed(0)
        rates = []
        for transfer in (file.read, file.write):
            seconds = rows = 0.0
            for _ in range(batches):
                keys = torch.randint(0, num_rows, (_BATCH,), generator=generator).unique()
                start = time.perf_counter()
                transfer(keys, zeros, torch.arange(len(keys)))
                seconds, rows = seconds + time.perf_counter() - start, rows + len(keys)
            rates.append(rows / seconds)
        return rates[0], rates[1]
    finally:
        file.close()
