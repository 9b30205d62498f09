"""Share of the memory bandwidth that lookups, updates and steps reach: `python -m benchmarks.gpu.bandwidth`.

Every figure is the bytes that the operation must move at least, per second, as a share of what a plain copy
of a large tensor reaches on the same device. Results are compared before anything is timed.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.tbe_contenders import Lookups, Op, Shape, classes

FULL = Shape(num_tables=8, num_rows=1_000_000, dim=128, batch=8192, bag=10)
TINY = Shape(num_tables=2, num_rows=1000, dim=16, batch=64, bag=10)


def lookup_bytes(shape: Shape) -> int:
    """Return the bytes of a lookup: a row is read for each ID, and each pooled row is written."""
    return 4 * shape.num_tables * shape.batch * shape.dim * (shape.bag + 1)


def seconds(call: Callable[[], Any], device: torch.device, rounds: int = 9, calls: int = 10) -> float:
    """Return the time of a call among several in a row, as in training: the median of some rounds."""
    for _ in range(3):
        call()
    times = []
    for _ in range(rounds):
        _finish(device)
        started = time.perf_counter()
        for _ in range(calls):
            call()
        _finish(device)
        times.append((time.perf_counter() - started) / calls)
    return statistics.median(times)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds(lambda: target.copy_(source), device)


def measure(shape: Shape, device: torch.device, copy_bytes: int = 1 << 30) -> list[str]:
    """Verify, time, and return the lines of the table."""
    lookups = Lookups(shape, device=str(device), sgd=True)
    # An update reads a gradient per ID, and reads and writes the touched rows.
    touched = sum(len(ids.unique()) for ids in lookups.ids_per_table)
    update_bytes = 4 * shape.dim * (lookups.ids.numel() + 2 * touched)
    peak = copy_bandwidth(device, copy_bytes)
    lines = [
        f"a copy moves {peak / 1e9:.0f} GB/s; shares of it:",
        f"{'':24}{'lookup':>8}{'update':>8}{'step':>8}",
    ]
    expected = None
    for kind in classes():
        if kind is Op:
            continue
        contender = kind(lookups)
        with torch.no_grad():
            before = contender.forward().clone()
        contender.step()
        with torch.no_grad():
            found = torch.stack([before, contender.forward()])
            expected = found if expected is None else expected
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
            look_up = seconds(contender.forward, device)
        step = seconds(contender.step, device)
        shares = [
            lookup_bytes(shape) / look_up / peak,
            update_bytes / max(step - look_up, 1e-9) / peak,
            (lookup_bytes(shape) + update_bytes) / step / peak,
        ]
        lines.append(f"{kind.name:24}" + "".join(f"{share:8.1%}" for share in shares))
        del contender
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="device to measure (cpu: a trial of the program)")
    device = torch.device(parser.parse_args().device)
    sizes = (FULL, device) if device.type == "cuda" else (TINY, device, 1 << 20)
    print("\n".join(measure(*sizes)))


if __name__ == "__main__":
    main()
