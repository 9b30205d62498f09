"""The fastest layout of the dense part on a link: prediction of `meshrec plan --layouts` beside measurement.

Two ranks with one core each are connected by a simulated network of several speeds. On every link the layouts
train the same model: replicas (DistributedDataParallel), sharded parameters (FSDP2), and two stages with the
predicted cut and number of splits. All of them must first give the gradients of the whole batch in one
process.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import meshrec
from benchmarks.harness import Bar, Effort, Result, table
from benchmarks.slow_network import BACKEND, set_network
from meshrec.distributed import ShardingEnv, ShardingPlan
from meshrec.model_parallel import DistributedModelParallel
from meshrec.pipeline.stages import StagedOverRanks
from meshrec.pipeline.stages.layouts import DenseLayout, layouts
from meshrec.planner import Link
from meshrec.testing import RankPool

LINKS = {
    "no limit": (0.0, float("inf")),
    "0.1 ms, 1 GB/s": (1e-4, 1e9),
    "1 ms, 200 MB/s": (1e-3, 2e8),
    "5 ms, 50 MB/s": (5e-3, 5e7),
}
"""Latency in seconds and bandwidth in bytes per second of the simulated network."""


class Dense(nn.Module):
    """A dense part of eight layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.over = nn.Sequential(
            *(layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU())), nn.Linear(width, 1)
        )

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        """Return logits [B, 1]."""
        logits: Tensor = self.over(dense)
        return logits


class Found(NamedTuple):
    """Predicted and measured milliseconds of a step on one link, by layout."""

    predicted: list[DenseLayout]
    measured: dict[str, list[float]]


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits.squeeze(1), target)


def _make(width: int) -> Dense:
    torch.manual_seed(0)
    return Dense(width)


class _Contenders:
    """The model of a rank under each layout, on the simulated network."""

    def __init__(self, width: int, batch: int) -> None:
        self._width = width
        self._mesh = init_device_mesh(
            "cpu", (2,), mesh_dim_names=("stage",), backend_override={"stage": BACKEND}
        )
        self.env = ShardingEnv.from_mesh(
            init_device_mesh("cpu", (2,), mesh_dim_names=("shard",), backend_override={"shard": BACKEND})
        )
        generator = torch.Generator().manual_seed(0)
        self.dense = torch.randn(batch, width, generator=generator)
        self.target = torch.randint(0, 2, (batch,), generator=generator).float()
        self.sparse = meshrec.KeyedJaggedTensor.from_lengths_sync(
            ["f"], torch.zeros(batch, dtype=torch.int64), torch.ones(batch, dtype=torch.int64)
        )
        self._copies = {kind: self._parallel(kind) for kind in ("ddp", "fsdp2")}
        self._staged: dict[tuple[tuple[str, ...], int], StagedOverRanks] = {}

    def step_of(self, layout: DenseLayout) -> Callable[[], nn.Module]:
        """Run a forward and backward pass; return the model that holds the gradients."""
        if layout.split_size is None:
            kind = "ddp" if "DDP" in layout.name else "fsdp2"
            return lambda: self._together(self._copies[kind])
        key = tuple(layout.cuts), layout.split_size
        assert key[0], f"{layout.name} has no names for its cuts"
        if key not in self._staged:
            self._staged[key] = StagedOverRanks(
                _make(self._width), mesh=self._mesh, cuts=key[0], split_size=key[1], criterion=_loss
            )
        return lambda: self._in_stages(self._staged[key])

    def gradients(self, layout: DenseLayout) -> dict[str, Tensor]:
        """Return this rank's gradients of the whole batch by name."""
        model = self.step_of(layout)()
        found = {}
        for name, parameter in model.named_parameters():
            grad: Any = parameter.grad
            found[name] = grad.to_local() if hasattr(grad, "to_local") else grad
        return found

    def _parallel(self, kind: Any) -> nn.Module:
        return DistributedModelParallel(
            _make(self._width), self.env, plan=ShardingPlan({}), sharders=[], dense=kind
        )

    def _together(self, model: nn.Module) -> nn.Module:
        model.zero_grad()
        half = len(self.dense) // 2
        own = slice(half * dist.get_rank(), half * (dist.get_rank() + 1))
        _loss(model(self.dense[own], None), self.target[own]).backward()
        return model

    def _in_stages(self, model: StagedOverRanks) -> nn.Module:
        model.zero_grad()
        model.step(self.dense, self.sparse, target=self.target)
        return model


def compare(tiny: bool, effort: Effort) -> dict[str, Found]:
    """Measure all links on a rank."""
    width, batch = (16, 64) if tiny else (768, 512)
    contenders = _Contenders(width, batch)
    base = _base(contenders.env.world.group)
    found = {}
    for name, (latency, speed) in LINKS.items():
        link = _slower(base, latency, speed)
        dist.barrier()  # so that both ranks measure at once: they will compute at once
        own = layouts(_make(width), contenders.dense, contenders.sparse, world_size=2, link=link)
        shared: list[Any] = [own]
        dist.broadcast_object_list(shared)  # each rank has measured a little differently
        predicted: list[DenseLayout] = shared[0]
        _verify(contenders, predicted)
        set_network(latency_seconds=latency, bytes_per_second=speed)
        try:
            found[name] = Found(predicted, _measured(contenders, predicted, effort))
        finally:
            set_network()
    return found


def _base(group: Any) -> Link:
    """Measure the network under the simulated one with all-reduces."""

    def seconds(num_elements: int) -> float:
        tensor = torch.ones(num_elements)
        taken = []
        for _ in range(7):
            start = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    small, large = seconds(1), seconds(1 << 20)
    speed = (4 << 20) / max(large - small, 1e-6)  # of n ranks 2 (n - 1) / n times the bytes, here once
    return Link(latency=small, all_to_all=speed, reduce_scatter=speed, all_reduce=speed)


def _slower(base: Link, latency: float, speed: float) -> Link:
    """Return the link as it is in effect: the real network first, and then at least the simulated time."""
    own = [min(each, speed) for each in (base.all_to_all, base.reduce_scatter, base.all_reduce)]
    return Link(
        latency=max(base.latency, latency), all_to_all=own[0], reduce_scatter=own[1], all_reduce=own[2]
    )


def _verify(contenders: _Contenders, predicted: list[DenseLayout]) -> None:
    """Check that every layout gives the gradients of one process."""
    plain = _make(contenders.dense.shape[1])
    _loss(plain(contenders.dense, None), contenders.target).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for layout in predicted:
        for name, grad in contenders.gradients(layout).items():
            whole = expected[name]
            assert whole is not None
            if grad.shape != whole.shape:  # FSDP2's shards of rows
                parts = whole.chunk(2)
                whole = parts[dist.get_rank()] if dist.get_rank() < len(parts) else whole[:0]
            torch.testing.assert_close(grad, whole, rtol=1e-4, atol=1e-6)


def _measured(
    contenders: _Contenders, predicted: list[DenseLayout], effort: Effort
) -> dict[str, list[float]]:
    milliseconds: dict[str, list[float]] = {layout.name: [] for layout in predicted}
    for number in range(1 + effort.rounds):
        for layout in predicted:
            step = contenders.step_of(layout)
            for call in range(1 + effort.calls):
                dist.barrier()
                start = time.perf_counter()
                step()
                if number and call:
                    milliseconds[layout.name].append(1e3 * (time.perf_counter() - start))
    return milliseconds


def run(effort: Effort, *, tiny: bool = False) -> Result:
    """Verify, predict, measure and compare."""
    with RankPool(2, timeout_seconds=900) as pool:
        ranks = pool.run(compare, tiny, effort)
    figures: dict[str, Any] = {}
    bars, rows = [], []
    for name in LINKS:
        predicted = ranks[0][name].predicted
        measured = {
            layout.name: max(statistics.median(rank[name].measured[layout.name]) for rank in ranks)
            for layout in predicted
        }
        best = min(measured.values())
        figures[name] = {
            layout.name: {"predicted_ms": 1e3 * layout.seconds, "measured_ms": measured[layout.name]}
            for layout in predicted
        }
        for layout in predicted:
            own = measured[layout.name]
            rows.append(
                [
                    f"{name}: {layout.name}",
                    f"{1e3 * layout.seconds:.1f}",
                    f"{own:.1f}",
                    f"{1e5 * layout.seconds / own - 100:+.0f} %",
                    "wins" if own == best else "",
                ]
            )
        over = 100 * (measured[predicted[0].name] / best - 1)
        bars.append(
            Bar(
                name=f"{name}: the predicted winner over the best",
                figure=over,
                asked=3,
                unit=" %",
                at_most=True,
            )
        )
    print(table(["two ranks; milliseconds a step", "predicted", "measured", "off", ""], rows), flush=True)
    return Result(figures, bars)
