"""Share of the memory bandwidth that lookups, updates and steps reach: `python -m benchmarks.gpu.bandwidth`.

Every figure is the bytes that the operation must move at least, per second, as a share of what a plain copy
of a large tensor reaches on the same device. Results are compared before anything is timed.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import meshrec
from meshrec.optim import SGD

LR = 0.1


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Tables of one width, whose features have bags of one size."""

    num_tables: int = 8
    num_rows: int = 1_000_000
    dim: int = 128
    batch: int = 8192
    bag: int = 10

    @property
    def lookup_bytes(self) -> int:
        """Return the bytes of a lookup: a row is read for each ID, and each pooled row is written."""
        return 4 * self.num_tables * self.batch * self.dim * (self.bag + 1)

    def update_bytes(self, num_touched: int) -> int:
        """Return the bytes of an update, which reads a gradient per ID, and reads and writes touched rows."""
        return 4 * self.dim * (self.num_tables * self.batch * self.bag + 2 * num_touched)


def drawn_ids(shape: Shape, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    size = (shape.num_tables, shape.batch * shape.bag)
    return torch.randint(0, shape.num_rows, size, generator=generator).to(device)


class Ours:
    """The fused collection, updated in the backward pass."""

    name = "MeshRec"

    def __init__(self, shape: Shape, weights: Tensor, ids: Tensor) -> None:
        names = [f"f{table}" for table in range(shape.num_tables)]
        tables = [
            meshrec.EmbeddingBagConfig(
                name=f"t{name}",
                num_embeddings=shape.num_rows,
                embedding_dim=shape.dim,
                feature_names=[name],
            )
            for name in names
        ]
        collection = meshrec.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        collection.to_empty(device=weights.device)
        for parameter, weight in zip(collection.parameters(), weights, strict=True):
            parameter.data.copy_(weight)
        self.fused = meshrec.fuse(collection, optimizer=SGD(lr=LR))
        lengths = torch.full((shape.num_tables * shape.batch,), shape.bag, device=ids.device)
        self.features = meshrec.KeyedJaggedTensor(names, ids.flatten(), lengths=lengths)

    def look_up(self) -> Tensor:
        return self.fused(self.features).values()

    def step(self, grad: Tensor) -> None:
        self.look_up().backward(grad)


class Torch:
    """One torch.nn.EmbeddingBag per table, with sparse gradients and torch's SGD."""

    name = "torch.nn.EmbeddingBag"

    def __init__(self, shape: Shape, weights: Tensor, ids: Tensor) -> None:
        self.bags = [
            torch.nn.EmbeddingBag.from_pretrained(weight.clone(), freeze=False, mode="sum", sparse=True)
            for weight in weights
        ]
        self.optimizer = torch.optim.SGD([bag.weight for bag in self.bags], lr=LR)
        self.ids = ids.view(shape.num_tables, shape.batch, shape.bag)

    def look_up(self) -> Tensor:
        return torch.cat([bag(ids) for bag, ids in zip(self.bags, self.ids, strict=True)], 1)

    def step(self, grad: Tensor) -> None:
        self.optimizer.zero_grad()
        self.look_up().backward(grad)
        self.optimizer.step()


class Fbgemm:
    """FBGEMM's table-batched embedding with a fused SGD."""

    name = "FBGEMM"

    def __init__(self, shape: Shape, weights: Tensor, ids: Tensor) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        on_gpu = weights.is_cuda
        place = EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST
        compute = ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU
        self.op = SplitTableBatchedEmbeddingBagsCodegen(
            [(shape.num_rows, shape.dim, place, compute)] * shape.num_tables,
            optimizer=EmbOptimType.EXACT_SGD,
            learning_rate=LR,
            device=weights.device,
        )
        for own, weight in zip(self.op.split_embedding_weights(), weights, strict=True):
            own.copy_(weight)
        self.ids = ids.flatten()
        self.offsets = torch.arange(0, self.ids.numel() + 1, shape.bag, device=ids.device)

    def look_up(self) -> Tensor:
        return self.op(self.ids, self.offsets)  # type: ignore[no-any-return]

    def step(self, grad: Tensor) -> None:
        self.look_up().backward(grad)


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
    torch.manual_seed(0)
    weights = torch.randn(shape.num_tables, shape.num_rows, shape.dim, device=device)
    ids, grad = (
        drawn_ids(shape, device),
        torch.randn(shape.batch, shape.num_tables * shape.dim, device=device),
    )
    num_touched = sum(len(own.unique()) for own in ids)
    peak = copy_bandwidth(device, copy_bytes)
    lines = [
        f"a copy moves {peak / 1e9:.0f} GB/s; shares of it:",
        f"{'':24}{'lookup':>8}{'update':>8}{'step':>8}",
    ]
    kinds: list[Any] = [Ours, Torch]
    if importlib.util.find_spec("fbgemm_gpu") is not None:
        kinds.append(Fbgemm)
    expected = None
    for kind in kinds:
        contender = kind(shape, weights, ids)
        with torch.no_grad():
            before = contender.look_up().clone()
        contender.step(grad)
        with torch.no_grad():
            found = torch.stack([before, contender.look_up()])
            expected = found if expected is None else expected
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
            look_up = seconds(contender.look_up, device)
        step = seconds(lambda contender=contender: contender.step(grad), device)
        update_bytes = shape.update_bytes(num_touched)
        shares = [
            shape.lookup_bytes / look_up / peak,
            update_bytes / max(step - look_up, 1e-9) / peak,
            (shape.lookup_bytes + update_bytes) / step / peak,
        ]
        lines.append(f"{kind.name:24}" + "".join(f"{share:8.1%}" for share in shares))
        del contender
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="device to measure (cpu: a trial of the program)")
    device = torch.device(parser.parse_args().device)
    if device.type == "cuda":
        print("\n".join(measure(Shape(), device)))
    else:
        print("\n".join(measure(Shape(num_tables=2, num_rows=1000, dim=16, batch=64), device, 1 << 20)))


if __name__ == "__main__":
    main()
