"""One training step of the same DLRM on 2 ranks: MeshRec, TorchRec, plain nn.EmbeddingBag, and the dense
part alone.

Every contender starts from the same weights and sees the same data; losses of the first steps are compared
before anything is timed.
"""

import gc
import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import Bar, Effort, Result, table
from meshrec.testing.rank_pool import RankPool

LR = 0.02
OURS = ["table_wise", "column_wise", "row_wise", "table_row_wise", "grid_shard", "data_parallel"]
THEIRS = ["table_wise", "column_wise", "data_parallel"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The model and its batches; ``batch`` samples on each rank, ``bag`` ids in each table."""

    num_tables: int = 26
    num_rows: int = 100_000
    dim: int = 64
    batch: int = 1024
    bag: int = 4
    dense_in: int = 13
    bottom: tuple[int, ...] = (512, 256, 64)
    top: tuple[int, ...] = (512, 512, 256, 1)


TINY = Shape(num_tables=4, num_rows=100, dim=8, batch=16, bottom=(16, 8), top=(16, 1))


class Inputs(NamedTuple):
    """A batch of one rank."""

    dense: Tensor
    ids: Tensor
    offsets: Tensor
    labels: Tensor


class Measured(NamedTuple):
    """What a contender did on one rank."""

    losses: list[float]
    milliseconds: list[float]
    sent_bytes: int


Step = Callable[[Inputs], Tensor]


def run(effort: Effort, *, tiny: bool = False) -> Result:
    """Verify, time, and hold against the bars."""
    shape = TINY if tiny else Shape()
    contenders = [("dense alone", ""), *(("meshrec", kind) for kind in OURS), ("plain DDP", "")]
    if importlib.util.find_spec("torchrec") is not None:
        contenders += [("torchrec", kind) for kind in THEIRS]
    found: dict[str, list[Measured]] = {}
    with RankPool(2, timeout_seconds=900) as pool:
        for library, kind in contenders:
            name = f"{library} {kind}".strip()
            found[name] = pool.run(measure_one, library, kind, shape, effort)
            print(f"  {name}: {_median(found[name]):.1f} ms", flush=True)
    _verify(found)
    return _report(found)


def measure_one(library: str, kind: str, shape: Shape, effort: Effort) -> Measured:
    """On every rank: build, take three steps for their losses, then time."""
    step = {
        "meshrec": meshrec_step,
        "torchrec": torchrec_step,
        "plain DDP": plain_step,
        "dense alone": dense_step,
    }[library](kind, shape)
    batches = [make_inputs(shape, number) for number in range(4)]
    losses = []
    for batch in batches[:3]:
        loss = step(batch).detach()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    times, sent = [], []
    for number in range(effort.rounds * effort.calls):
        dist.barrier()
        before, start = _bytes_sent(), time.perf_counter()
        step(batches[number % 4])
        times.append(1e3 * (time.perf_counter() - start))
        sent.append(_bytes_sent() - before)
    del step
    gc.collect()
    return Measured(losses, times, int(statistics.median(sent)))


def make_inputs(shape: Shape, number: int) -> Inputs:
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    num_bags = shape.num_tables * shape.batch
    return Inputs(
        torch.rand(shape.batch, shape.dense_in, generator=generator),
        torch.randint(0, shape.num_rows, (num_bags * shape.bag,), generator=generator),
        torch.arange(num_bags + 1) * shape.bag,
        torch.randint(0, 2, (shape.batch,), generator=generator).float(),
    )


def fill(weight: Tensor) -> Tensor:
    """First values that depend on the row alone: TorchRec fills every shard as if it were a table."""
    values = 0.01 * torch.arange(weight.shape[0]).sin()
    with torch.no_grad():
        return weight.copy_(values[:, None] if weight.dim() == 2 else values)


def keyed(shape: Shape) -> list[str]:
    return [f"f{number}" for number in range(shape.num_tables)]


def meshrec_step(kind: str, shape: Shape) -> Step:
    from meshrec import distributed as md
    from meshrec.model_parallel import DistributedModelParallel
    from meshrec.models import DLRM
    from meshrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
    from meshrec.optim import RowWiseAdagrad
    from meshrec.sparse import KeyedJaggedTensor

    world = dist.get_world_size()
    builders = {
        "table_wise": lambda number: md.table_wise(rank=number % world),
        "column_wise": lambda number: md.column_wise(),
        "row_wise": lambda number: md.row_wise(),
        "table_row_wise": lambda number: md.table_row_wise(node=0),
        "grid_shard": lambda number: md.grid_shard(),
        "data_parallel": lambda number: md.data_parallel(),
    }
    tables = [
        EmbeddingBagConfig(
            name=f"t{number}",
            embedding_dim=shape.dim,
            num_embeddings=shape.num_rows,
            feature_names=[f"f{number}"],
            init_fn=fill,
        )
        for number in range(shape.num_tables)
    ]
    collection = EmbeddingBagCollection(tables=tables)
    torch.manual_seed(0)
    model = DLRM(collection, shape.dense_in, shape.bottom, shape.top)
    path = "sparse_arch.embedding_bag_collection"
    plan = md.construct_module_sharding_plan(
        model.get_submodule(path),
        {f"t{number}": builders[kind](number) for number in range(shape.num_tables)},
        world_size=world,
        local_size=1 if kind == "grid_shard" else None,
    )
    sharder = md.EmbeddingBagCollectionSharder(RowWiseAdagrad(lr=LR, eps=1e-8))
    dmp = DistributedModelParallel(model, plan=md.ShardingPlan({path: plan}), sharders=[sharder])
    dense = [p for name, p in dmp.named_parameters() if path not in name]
    optimizer = torch.optim.Adagrad(dense, lr=LR)

    def step(inputs: Inputs) -> Tensor:
        features = KeyedJaggedTensor(keyed(shape), inputs.ids, offsets=inputs.offsets)
        return _train(dmp, optimizer, inputs, features)

    return step


def torchrec_step(kind: str, shape: Shape) -> Step:
    import warnings

    warnings.simplefilter("ignore")
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import (
        column_wise,
        construct_module_sharding_plan,
        data_parallel,
        table_wise,
    )
    from torchrec.distributed.types import ShardingPlan
    from torchrec.models.dlrm import DLRM

    world = dist.get_world_size()
    builders = {
        # Left to itself it takes the dense kernel on a CPU, and then drops the optimizer.
        "table_wise": lambda number: table_wise(rank=number % world, compute_kernel="fused"),
        "column_wise": lambda number: column_wise(ranks=list(range(world)), compute_kernel="fused"),
        "data_parallel": lambda number: data_parallel(),
    }
    tables = [
        EmbeddingBagConfig(
            name=f"t{number}",
            embedding_dim=shape.dim,
            num_embeddings=shape.num_rows,
            feature_names=[f"f{number}"],
            init_fn=fill,
        )
        for number in range(shape.num_tables)
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    torch.manual_seed(0)
    model = DLRM(collection, shape.dense_in, list(shape.bottom), list(shape.top))
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LR, "eps": 1e-8}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    path = "sparse_arch.embedding_bag_collection"
    plan = construct_module_sharding_plan(
        model.get_submodule(path),
        {f"t{number}": builders[kind](number) for number in range(shape.num_tables)},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    dmp = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({path: plan}), sharders=[sharder]
    )
    ordinary = [p for name, p in dmp.named_parameters() if path not in name or kind == "data_parallel"]
    optimizer = torch.optim.Adagrad(ordinary, lr=LR)

    def step(inputs: Inputs) -> Tensor:
        features = KeyedJaggedTensor(
            keys=keyed(shape), values=inputs.ids, offsets=inputs.offsets, lengths=inputs.offsets.diff()
        )
        return _train(dmp, optimizer, inputs, features)

    return step


class _PlainTables(nn.Module):
    """What a user without a library writes."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(shape.num_rows, shape.dim, mode="sum", include_last_offset=True)
            for _ in range(shape.num_tables)
        )
        for each in self.tables:
            fill(each.weight)

    def forward(self, inputs: Inputs) -> Tensor:
        offsets = inputs.offsets[: self._shape.batch + 1]
        ids = inputs.ids.chunk(self._shape.num_tables)
        return torch.stack([each(own, offsets) for each, own in zip(self.tables, ids, strict=True)], dim=1)


class _NoTables(nn.Module):
    """The same sizes without a table."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._vectors = torch.rand(shape.batch, shape.num_tables, shape.dim).requires_grad_()

    def forward(self, inputs: Inputs) -> Tensor:
        return self._vectors


class _PlainModel(nn.Module):
    def __init__(self, shape: Shape, tables: nn.Module) -> None:
        from meshrec.models import DenseArch, InteractionArch, OverArch

        super().__init__()
        self.tables = tables
        torch.manual_seed(0)
        self.dense_arch = DenseArch(shape.dense_in, shape.bottom)
        self.inter_arch = InteractionArch(shape.num_tables)
        self.over_arch = OverArch(self.inter_arch.model.out_features(shape.dim), shape.top)

    def forward(self, dense: Tensor, inputs: Inputs) -> Tensor:
        return self.over_arch(self.inter_arch(self.dense_arch(dense), self.tables(inputs)))


def plain_step(kind: str, shape: Shape) -> Step:
    model = nn.parallel.DistributedDataParallel(_PlainModel(shape, _PlainTables(shape)))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
    return lambda inputs: _train(model, optimizer, inputs, inputs)


def dense_step(kind: str, shape: Shape) -> Step:
    """Without a process group's work either: what no sharding can save."""
    model = _PlainModel(shape, _NoTables(shape))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
    return lambda inputs: _train(model, optimizer, inputs, inputs)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Inputs, features: Any) -> Tensor:
    optimizer.zero_grad()
    logits = model(inputs.dense, features).squeeze(-1)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, inputs.labels)
    loss.backward()
    optimizer.step()
    return loss


def _bytes_sent() -> int:
    """What left all network interfaces of this machine, the one to itself included."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines)


def _median(ranks: list[Measured]) -> float:
    return statistics.median(max(both) for both in zip(*(rank.milliseconds for rank in ranks), strict=True))


def _verify(found: dict[str, list[Measured]]) -> None:
    """All but the dense part alone start with one loss; those with the same optimizer keep to it."""
    reference = found["meshrec table_wise"][0].losses
    for name, ranks in found.items():
        if name == "dense alone":
            continue
        # Others have no row-wise optimizer, or apply it to each column shard alone.
        steps = 3 if name.startswith("meshrec") or name == "torchrec table_wise" else 1
        for loss, expected in zip(ranks[0].losses[:steps], reference[:steps], strict=True):
            if abs(loss - expected) > 1e-4 * abs(expected):
                raise AssertionError(f"{name}: losses {ranks[0].losses}, expected {reference}")


def _report(found: dict[str, list[Measured]]) -> Result:
    times = {name: _median(ranks) for name, ranks in found.items()}
    dense = times["dense alone"]
    rows = [
        [name, f"{ms:.1f}", f"{ms - dense:.1f}", f"{found[name][0].sent_bytes / 1e6:.1f}"]
        for name, ms in times.items()
    ]
    print(table(["contender", "step ms", "not dense ms", "MB on the wire"], rows))
    ours = {kind: times[f"meshrec {kind}"] for kind in OURS}
    bars = [
        Bar(
            name=f"{kind} against table_wise", figure=ours[kind] / ours["table_wise"], asked=1.3, at_most=True
        )
        for kind in ("row_wise", "table_row_wise", "grid_shard")
    ]
    for kind in THEIRS:
        theirs = times.get(f"torchrec {kind}")
        if theirs is None:
            continue
        asked = 15.0 if kind == "data_parallel" else 2.0
        bars.append(Bar(name=f"{kind} against TorchRec", figure=theirs / ours[kind], asked=asked))
        if kind != "data_parallel":
            figure = (theirs - dense) / max(ours[kind] - dense, 1e-3)
            bars.append(Bar(name=f"{kind}, what is not dense", figure=figure, asked=4.0))
    figures = {
        name: {"step_ms": ms, "sent_bytes": found[name][0].sent_bytes, "losses": found[name][0].losses}
        for name, ms in times.items()
    }
    return Result(figures, bars)
