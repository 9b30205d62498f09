"""Wire formats and two levels: bytes per step, steps on links of 1 to 100 Gb/s, and the speed of the
kernels.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import wire_links
from benchmarks.harness import Bar, Effort, Result, measure, table

LINKS = (1.0, 10.0, 25.0, 100.0)
"""Speeds of the link between the nodes, in Gb/s."""
CONTENDERS = (
    ("one level", "fp32"),
    ("one level", "fp16"),
    ("one level", "bf16"),
    ("one level", "int8/bf16"),
    ("one level", "int8"),
    ("one level", "int8+stochastic"),
    ("one level", "int4/int8"),
    ("sums", "fp32"),
    ("sums", "int8"),
    ("rows", "fp32"),
    ("rows", "int8"),
)
SENT = ("embeddings", "embeddings between nodes", "gradients of embeddings", "gradients between nodes")
_PATH = "sparse_arch.embedding_bag_collection"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Size of the model and of the batch of each rank. IDs are Zipf-distributed: ranks share the hot ones."""

    num_tables: int = 8
    num_rows: int = 50_000
    dim: int = 64
    batch: int = 1024
    bag: int = 2
    exponent: float = 1.2
    steps: int = 4
    rounds: int = 2
    latency: float = 0.0
    """Seconds that a collective between nodes takes at least; only on the delayed network."""


SMALL = Shape(batch=64, latency=1e-3)
"""A batch whose step waits for messages rather than for their bytes."""
DELAYED = (("one level", "fp32"), ("one level", "int8"), ("sums", "fp32"), ("rows", "fp32"), ("rows", "int8"))
TINY = Shape(num_tables=2, num_rows=100, batch=16, steps=1, rounds=1)


class Found(NamedTuple):
    """The figures of one contender on one rank."""

    seconds: list[float]
    sent: dict[str, int]
    predicted: tuple[float, float] | None
    losses: list[float]
    coding: float
    """Seconds of encoding and decoding in a step, by a clock on the wall; the median of some steps."""


class _Trainee(NamedTuple):
    step: Callable[[int], Tensor]
    predicted: tuple[float, float] | None


def batch_of(shape: Shape, number: int) -> tuple[Tensor, Any, Tensor]:
    from meshrec.sparse import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    bags = shape.num_tables * shape.batch
    weights = torch.arange(1, shape.num_rows + 1).double().pow(-shape.exponent)
    ids = torch.multinomial(weights, bags * shape.bag, True, generator=generator)
    return (
        torch.rand(shape.batch, 13, generator=generator),
        KeyedJaggedTensor(
            [f"f{number}" for number in range(shape.num_tables)],
            ids,
            offsets=torch.arange(bags + 1) * shape.bag,
        ),
        torch.randint(0, 2, (shape.batch,), generator=generator).float(),
    )


def trainee(shape: Shape, level: str, wire: str, batches: Sequence[Any]) -> _Trainee:
    """Build a DLRM whose tables are split by rows over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    from meshrec import distributed as md
    from meshrec.comms.mesh import default_env
    from meshrec.comms.wire import CommsPrecision, TableWires
    from meshrec.model_parallel import DistributedModelParallel
    from meshrec.models import DLRM
    from meshrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
    from meshrec.optim import RowWiseAdagrad

    names = [f"t{number}" for number in range(shape.num_tables)]
    configs = [
        EmbeddingBagConfig(
            name=name, embedding_dim=shape.dim, num_embeddings=shape.num_rows, feature_names=[f"f{number}"]
        )
        for number, name in enumerate(names)
    ]
    torch.manual_seed(0)
    model = DLRM(EmbeddingBagCollection(tables=configs), 13, (64, shape.dim), (64, 1))
    env = default_env()
    if level != "one level":
        names_of_axes = ("node", "local")
        env = md.ShardingEnv.from_mesh(
            init_device_mesh(
                "cpu",
                (2, 2),
                mesh_dim_names=names_of_axes,
                # Only what crosses the network is delayed.
                backend_override={"local": "gloo"} if shape.latency else None,
            )
        )
    module = model.get_submodule(_PATH)
    wires = TableWires.parse(wire)
    plan = md.construct_module_sharding_plan(
        module, {name: md.row_wise() for name in names}, world_size=env.shard.size, local_size=2
    )
    predicted = None if level == "rows" else _predicted(shape, module, plan, wires, sums=level == "sums")
    sharder = md.EmbeddingBagCollectionSharder(
        RowWiseAdagrad(lr=0.02),
        precision=CommsPrecision.of(wires),
        across_nodes="rows" if level == "rows" else "sums",
    )
    dmp = DistributedModelParallel(model, env=env, plan=md.ShardingPlan({_PATH: plan}), sharders=[sharder])
    dense = [parameter for name, parameter in dmp.named_parameters() if _PATH not in name]
    optimizer = torch.optim.Adagrad(dense, lr=0.02)

    def step(number: int) -> Tensor:
        values, features, labels = batches[number % len(batches)]
        loss = nn.functional.binary_cross_entropy_with_logits(dmp(values, features).view(-1), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return _Trainee(step, predicted)


def _predicted(shape: Shape, module: nn.Module, plan: Any, wires: Any, *, sums: bool) -> tuple[float, float]:
    """Return the bytes of embeddings and of gradients that the planner predicts for all ranks."""
    from meshrec.planner import ParameterConstraints, Topology
    from meshrec.planner.evaluate import evaluate
    from meshrec.planner.module_tables import tables_of_model

    constraints = {
        f"t{number}": ParameterConstraints(pooling_factors=[float(shape.bag)])
        for number in range(shape.num_tables)
    }
    tables = tables_of_model(module, None, constraints, default_wire=wires)
    topology = Topology(world_size=4, local_world_size=2, compute_device="cpu", sum_in_node=sums)
    found = evaluate({"": plan}, tables, topology, batch_size=shape.batch).sent_bytes
    return found["output"], found["gradient"]


def on_ranks(shape: Shape, contenders: Sequence[tuple[str, str]]) -> list[Found]:
    """Train all contenders in turns. Every rank calls this."""
    from meshrec import distributed as md
    from meshrec.comms.encoding import RowEncoding

    if shape.latency:
        from benchmarks.slow_network import set_network

        set_network(latency_seconds=shape.latency)
    batches = [batch_of(shape, number) for number in range(4)]
    trainees = [trainee(shape, level, wire, batches) for level, wire in contenders]
    seconds: list[list[float]] = [[] for _ in contenders]
    losses = [[float(each.step(number)) for number in range(3)] for each in trainees]
    traffics, codings = [], []
    spent = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                spent[0] += time.perf_counter() - start

        return call

    plain = RowEncoding.encode, RowEncoding.decode
    for each in trainees:
        own_codings = []
        for _ in range(shape.steps + 1):
            RowEncoding.encode, RowEncoding.decode = map(timed, plain)  # type: ignore[method-assign]
            spent[0] = 0.0
            with md.measure_traffic() as traffic, _recorded_gathers() as gathers:
                each.step(3)
            RowEncoding.encode, RowEncoding.decode = plain  # type: ignore[method-assign]
            own_codings.append(spent[0] + sum(map(_decoding_seconds, gathers)))
        traffics.append(dict(traffic))
        codings.append(statistics.median(own_codings))
    for _ in range(shape.rounds):
        for each, own in zip(trainees, seconds, strict=True):
            each.step(0)
            for number in range(shape.steps):
                dist.barrier()
                start = time.perf_counter()
                each.step(number)
                took = torch.tensor(time.perf_counter() - start)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                own.append(float(took))
    return [
        Found(own, traffic, each.predicted, loss, coding)
        for own, traffic, each, loss, coding in zip(seconds, traffics, trainees, losses, codings, strict=True)
    ]


class _Gather(NamedTuple):
    """A call of the kernel that adds rows up while it decodes them."""

    seconds: float
    arguments: tuple[Any, ...]


@contextmanager
def _recorded_gathers() -> Iterator[list[_Gather]]:
    """Record the calls of ``gather_coded`` inside."""
    found: list[_Gather] = []
    packet = torch.ops.meshrec.gather_coded
    op = packet.default

    def gather(*arguments: Any) -> Tensor:
        start = time.perf_counter()
        out: Tensor = op(*arguments)
        found.append(_Gather(time.perf_counter() - start, arguments))
        return out

    packet.default = gather
    try:
        yield found
    finally:
        packet.default = op


def _decoding_seconds(gather: _Gather) -> float:
    """Return how much longer a gather took than one of the same rows in fp32; 0 if it cannot be repeated."""
    received, *others = gather.arguments
    if not received.numel():  # read from the memory of a peer, which has other things there by now
        return 0.0
    pooled, columns = others[:9], others[9:12]
    ops = torch.ops.meshrec
    values = ops.wire_decode(received, [pooled[3]] * len(pooled[2]), *columns)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        ops.gather_pooled(values, *pooled)
        seconds.append(time.perf_counter() - start)
    return max(gather.seconds - statistics.median(seconds), 0.0)


def kernel_bars(effort: Effort, *, tiny: bool) -> tuple[dict[int, dict[str, float]], list[Bar]]:
    """Measure the bytes that the kernels read and write per second, on one thread and on all, over those of a
    copy of the same rows.
    """
    from meshrec.ops.memory import keep_freed_memory

    keep_freed_memory()
    # Pieces that the allocator keeps the memory of, and together four times as large as a cache of 32 MiB.
    pieces = torch.randn(4, 1 << (10 if tiny else 17), 64).unbind()
    threads, found, bars = torch.get_num_threads(), {}, []
    for number in sorted({1, threads}):
        torch.set_num_threads(number)
        speeds = _kernel_speeds(pieces, effort)
        torch.set_num_threads(threads)
        found[number] = speeds
        of_copy = {name: speed / speeds["copy"] for name, speed in speeds.items()}
        rows = [[name, f"{speeds[name]:.1f}", f"{share:.2f}x"] for name, share in of_copy.items()]
        print(table([f"kernel, {number} threads", "GB/s", "of a copy"], rows))
        bars += [
            Bar(
                name=f"{way} int8, {number} threads, bytes per second over a copy",
                figure=of_copy[f"{way} int8"],
                asked=0.8,
            )
            for way in ("encode", "decode")
        ]
    return found, bars


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


def verified(by_rank: Sequence[Sequence[Found]], contenders: Sequence[tuple[str, str]]) -> None:
    """Check that all contenders learn the same, and that the plan's bytes are those that were sent."""
    for number, (level, wire) in enumerate(contenders):
        ranks = [found[number] for found in by_rank]
        exact = [found[0] for found in by_rank]
        for own, other in zip(ranks, exact, strict=True):
            tolerance = 1e-5 if wire == "fp32" else 0.02
            torch.testing.assert_close(
                torch.tensor(own.losses), torch.tensor(other.losses), rtol=tolerance, atol=tolerance
            )
        sent = sent_bytes(ranks)
        if ranks[0].predicted is not None and sent != sum(ranks[0].predicted):
            raise AssertionError(f"{level}, {wire}: sent {sent}, predicted {ranks[0].predicted}")


def sent_bytes(ranks: Sequence[Found]) -> int:
    """Return the bytes of embeddings and gradients that all ranks sent in a step."""
    return sum(found.sent.get(name, 0) for found in ranks for name in SENT)


def crossing_bytes(ranks: Sequence[Found], level: str) -> float:
    """Return the bytes of embeddings and gradients that crossed between nodes, of all ranks."""
    if level == "one level":
        return sent_bytes(ranks) * 2 / 3  # of three peers, two are on the other node
    return sum(found.sent.get(name, 0) for found in ranks for name in SENT if "nodes" in name)


def delayed(nodes: wire_links.Nodes, *, tiny: bool) -> dict[str, float]:
    """Time steps of small batches where each collective between nodes takes a millisecond at least."""
    from benchmarks.slow_network import BACKEND

    shape = replace(TINY, latency=SMALL.latency) if tiny else SMALL
    by_rank = wire_links.run_ranks(nodes, on_ranks, shape, DELAYED, backend=BACKEND)
    verified(by_rank, DELAYED)
    found = {
        f"{level}, {wire}": 1e3 * statistics.median(by_rank[0][number].seconds)
        for number, (level, wire) in enumerate(DELAYED)
    }
    print(
        table(
            [f"{shape.batch} samples, latency {1e3 * shape.latency:g} ms", "step, ms"],
            [[name, f"{ms:.1f}"] for name, ms in found.items()],
        )
    )
    return found


def run(effort: Effort, *, tiny: bool = False) -> Result:
    """Time the kernels, then steps on every link; ``tiny``: small tables on one link."""
    figures: dict[str, Any] = {}
    figures["kernels"], bars = kernel_bars(effort, tiny=tiny)
    if reason := wire_links.why_not():
        print(f"steps on links are not timed: {reason}")
        return Result(figures, bars)
    shape, steps = TINY if tiny else Shape(), {}
    with wire_links.two_nodes() as nodes:
        for link in LINKS[:1] if tiny else LINKS:
            nodes.limit(link)
            by_rank = wire_links.run_ranks(nodes, on_ranks, shape, CONTENDERS)
            verified(by_rank, CONTENDERS)
            steps[link] = {
                each: 1e3 * statistics.median(by_rank[0][number].seconds)
                for number, each in enumerate(CONTENDERS)
            }
            last = by_rank
        nodes.limit(LINKS[-1])
        figures["delayed_ms"] = delayed(nodes, tiny=tiny)
    rows = []
    for number, (level, wire) in enumerate(CONTENDERS):
        ranks = [found[number] for found in last]
        exact = [found[0] for found in last]
        coding = 1e3 * max(found.coding for found in ranks)
        figures[f"{level}, {wire}"] = {
            "bytes": sent_bytes(ranks),
            "crossing": crossing_bytes(ranks, level),
            "coding_ms": coding,
            "steps_ms": {link: own[level, wire] for link, own in steps.items()},
        }
        cells = [f"{own[level, wire]:.1f}" for own in steps.values()]
        share = sent_bytes(ranks) / sent_bytes(exact)
        crossing = crossing_bytes(ranks, level)
        rows.append(
            [
                f"{level}, {wire}",
                f"{sent_bytes(ranks) / 1e6:.2f}",
                f"{share:.3f}x",
                f"{crossing / 1e6:.2f}",
                f"{coding:.1f}",
                *cells,
            ]
        )
    header = ["", "MB/step", "of fp32", "MB across", "coding, ms", *[f"{link:g} Gb/s, ms" for link in steps]]
    print(table(header, rows))
    slow, fast = steps[min(steps)], steps[max(steps)]
    full = sent_bytes([found[0] for found in last])
    int8 = CONTENDERS.index(("one level", "int8"))
    bars += [
        Bar(
            name="bytes of embeddings and gradients, int8 over fp32 (measured and predicted)",
            figure=sent_bytes([found[int8] for found in last]) / full,
            asked=0.3,
            at_most=True,
        ),
        Bar(
            name="step on 1 Gb/s, fp32 over int8, one level",
            figure=slow["one level", "fp32"] / slow["one level", "int8"],
            asked=2.0,
        ),
        Bar(
            name="step on 1 Gb/s, int8, one level over distinct rows",
            figure=slow["one level", "int8"] / slow["rows", "int8"],
            asked=1.5,
        ),
        Bar(
            name="encode + decode in a step on the fastest link, int8",
            figure=100 * figures["one level, int8"]["coding_ms"] / fast["one level", "int8"],
            asked=5.0,
            unit=" %",
            at_most=True,
        ),
    ]
    return Result(figures, bars)
