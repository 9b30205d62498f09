"""Wire formats: bytes that the kernels read and write per second, over those of a copy."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Bar, Effort, Result, measure, table, threads


def run(effort: Effort, *, tiny: bool = False) -> Result:
    """Measure the bytes that the kernels read and write per second, on one thread and on all, over those of a
    copy of the same rows.
    """
    from meshrec.ops.memory import keep_freed_memory

    keep_freed_memory()
    # Pieces that the allocator keeps the memory of, and together four times as large as a cache of 32 MiB.
    pieces = torch.randn(4, 1 << (10 if tiny else 17), 64).unbind()
    found, bars = {}, []
    for number in sorted({1, torch.get_num_threads()}):
        with threads(number):
            speeds = found[number] = _kernel_speeds(pieces, effort)
        of_copy = {name: speed / speeds["copy"] for name, speed in speeds.items()}
        rows = [[name, f"{speeds[name]:.1f}", f"{share:.2f}x"] for name, share in of_copy.items()]
        print(table([f"kernel, {number} threads", "GB/s", "of a copy"], rows))
        for name in ("encode int8", "decode int8"):
            text = f"{name}, {number} threads, bytes per second over a copy"
            bars.append(Bar(text, of_copy[name], 0.8))
    return Result(found, bars)


def _kernel_speeds(pieces: Sequence[Tensor], effort: Effort) -> dict[str, float]:
    """Return GB/s of a copy, and of the kernels of each format. Every call goes through all pieces."""
    from meshrec.comms.wire import FORMATS

    results: list[Any] = [torch.empty_like(piece) for piece in pieces]
    targets = [torch.empty_like(piece) for piece in pieces]
    calls: dict[str, Callable[[int], Any]] = {"copy": lambda k: targets[k].copy_(pieces[k])}
    num_bytes = {"copy": 2 * sum(piece.nbytes for piece in pieces)}
    for name in ("int8", "int4", "int8+stochastic"):
        format = FORMATS[name]
        messages = [format.encode(piece) for piece in pieces]
        for piece, message in zip(pieces, messages, strict=True):
            error = (format.decode(message, piece.shape[1]) - piece).abs().max()
            assert float(error) <= format.error_bound(float(piece.abs().max()))
        calls[f"encode {name}"] = lambda k, format=format: format.encode(pieces[k])
        calls[f"decode {name}"] = lambda k, format=format, messages=messages: format.decode(messages[k], 64)
        both = sum(each.nbytes for each in (*pieces, *messages))
        num_bytes |= {f"encode {name}": both, f"decode {name}": both}

    def through(call: Callable[[int], Any]) -> Callable[[], None]:
        def run_all() -> None:
            for k in range(len(pieces)):
                results[k] = call(k)

        return run_all

    times = measure({name: through(call) for name, call in calls.items()}, effort)
    return {name: num_bytes[name] / timing.median / 1e6 for name, timing in times.items()}
