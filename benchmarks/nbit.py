"""Quantised lookups and quantisation, against FBGEMM, our fp32 tables and the memory limit."""

import importlib.util
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Bar, Effort, Result, Timing, measure, table
from benchmarks.memory_limit import PREFETCHES, LineLimit, Prefetch
from benchmarks.tbe import LIMIT, with_one_limit

KINDS = {"fp16": 0, "int8": 8, "int4": 4, "int2": 2}
THREADS = (1, 2)
FP32 = "meshrec, fp32"
OURS, THEIRS = "meshrec", "FBGEMM"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Number of rows. At 8 bits they take four times a last-level cache of 32 MiB."""

    num_tables: int = 4
    num_rows: int = 500_000
    dim: int = 64
    batch: int = 2048
    bag: int = 20
    hot: int | None = None
    """Number of tables that get 99 % of the IDs."""


NUM_BATCHES = 4
"""Batches used in turn, because the rows of a single one would stay in the last-level cache."""


class Lookups:
    """One batch of int32 IDs, table by table."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.full((shape.num_tables, shape.batch), shape.bag)
        if shape.hot is not None:
            total = lengths.sum()
            lengths[: shape.hot] = int(0.99 * total) // (shape.hot * shape.batch)
            rest = torch.randint(0, 2, (shape.num_tables - shape.hot, shape.batch), generator=generator)
            lengths[shape.hot :] = rest
        self.lengths = lengths.view(-1).int()
        self.offsets = torch.cat([torch.zeros(1), self.lengths.cumsum(0)]).int()
        counts = lengths.sum(1).tolist()
        self.ids = torch.randint(0, shape.num_rows, (sum(counts),), generator=generator).int()
        self.ids_per_table = list(self.ids.split(counts))


def our_model(shape: Shape) -> Any:
    import meshrec

    torch.manual_seed(1)
    return meshrec.EmbeddingBagCollection(
        [
            meshrec.EmbeddingBagConfig(
                name=f"t{t}",
                num_embeddings=shape.num_rows,
                embedding_dim=shape.dim,
                feature_names=[f"f{t}"],
                weight_init_min=-0.1,
                weight_init_max=0.1,
            )
            for t in range(shape.num_tables)
        ]
    )


def our_call(model: Any, lookups: Lookups) -> Callable[[], Tensor]:
    """Return a call of our public module, which makes a new KeyedJaggedTensor each time."""
    import meshrec

    keys = [f"f{t}" for t in range(lookups.shape.num_tables)]

    @torch.inference_mode()
    def call() -> Tensor:
        features = meshrec.KeyedJaggedTensor(keys, lookups.ids, offsets=lookups.offsets)
        return model(features).values()

    return call


def in_turn(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """Return a function that calls the next of several functions each time."""
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def their_op(weights: list[Tensor], bits: int, shape: Shape) -> Any:
    """FBGEMM's lookup of the same rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fbgemm_gpu import split_table_batched_embeddings_ops_inference as inference
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation

    kind = inference.SparseType.FP16 if bits == 0 else getattr(inference.SparseType, f"INT{bits}")
    specs = [
        (f"t{t}", shape.num_rows, shape.dim, kind, EmbeddingLocation.HOST) for t in range(shape.num_tables)
    ]
    op = inference.IntNBitTableBatchedEmbeddingBagsCodegen(
        specs, output_dtype=inference.SparseType.FP32, device="cpu"
    )
    op.fill_random_weights()
    for weight, (memory, params) in zip(weights, op.split_embedding_weights(), strict=True):
        if bits == 0:
            memory.copy_(weight.view(torch.uint8))
        elif params is None:  # a row begins with its scale and its bias, as ours does
            memory.copy_(weight[:, : memory.shape[1]])
        else:
            params.copy_(weight[:, :4])
            memory.copy_(weight[:, 4 : 4 + memory.shape[1]])
    return op


def their_call(op: Any, lookups: Lookups) -> Callable[[], Tensor]:
    @torch.inference_mode()
    def call() -> Tensor:
        return op(lookups.ids, lookups.offsets)

    return call


def limit_calls(rows: list[Tensor], batches: Sequence[Lookups]) -> dict[str, Callable[[], Any]]:
    memory = [table.view(torch.uint8) for table in rows]
    limits = [LineLimit(memory, lookups.ids_per_table) for lookups in batches]
    ways = [*PREFETCHES, Prefetch(64, True)]
    return {f"{LIMIT}, {way}": in_turn([partial(limit.forward, way) for limit in limits]) for way in ways}


def at_threads(calls: dict[str, Callable[[], Any]], effort: Effort) -> dict[int, dict[str, Timing]]:
    before, timings = torch.get_num_threads(), {}
    for threads in THREADS:
        torch.set_num_threads(threads)
        timings[threads] = with_one_limit(measure(calls, effort))
    torch.set_num_threads(before)
    return timings


def time_kind(
    kind: str, batches: Sequence[Lookups], model: Any, effort: Effort
) -> dict[int, dict[str, Timing]]:
    """Compare the sums with those of the decoded rows and of FBGEMM, then time."""
    from meshrec import DataType
    from meshrec.quant import quantize

    bits = KINDS[kind]
    made = quantize(model, DataType[kind.upper()], output_dtype=DataType.FP32)
    rows = [weight.detach() for _, weight in made.tables().values()]
    makers: dict[str, Callable[[Lookups], Callable[[], Tensor]]] = {OURS: partial(our_call, made)}
    if importlib.util.find_spec("fbgemm_gpu") is not None:
        makers[THEIRS] = partial(their_call, their_op(rows, bits, batches[0].shape))
    for lookups in batches:
        verify({name: make(lookups) for name, make in makers.items()}, rows, bits, lookups)
    makers[FP32] = partial(our_call, model)
    calls = {name: in_turn([make(lookups) for lookups in batches]) for name, make in makers.items()}
    return at_threads(calls | limit_calls(rows, batches), effort)


def verify(calls: dict[str, Callable[[], Tensor]], rows: list[Tensor], bits: int, lookups: Lookups) -> None:
    from meshrec.ops import nbit

    shape, sums = lookups.shape, []
    for table_rows, ids, lengths in zip(
        rows, lookups.ids_per_table, lookups.lengths.view(shape.num_tables, -1), strict=True
    ):
        chosen = table_rows[ids.long()]
        numbers = chosen.float() if bits == 0 else nbit.dequantize(chosen, bits, shape.dim)
        samples = torch.arange(shape.batch).repeat_interleave(lengths.long())
        sums.append(
            torch.zeros(shape.batch, shape.dim, dtype=torch.float64).index_add_(0, samples, numbers.double())
        )
    expected = torch.cat(sums, 1).float()
    scale = float(expected.abs().max())
    for call in calls.values():
        torch.testing.assert_close(call(), expected, rtol=1e-6, atol=3e-7 * scale)


def bars_of(kind: str, timings: dict[int, dict[str, Timing]], *, hot: bool) -> list[Bar]:
    bars: list[Bar] = []
    asked = {2: 1.6} if hot else {1: 1.0, 2: 1.7}
    for threads, ratio in asked.items():
        times = timings[threads]
        if THEIRS in times:
            bars.append(
                Bar(
                    name=f"{kind}{', hot tables' if hot else ''}, {threads} threads, vs FBGEMM",
                    figure=times[THEIRS].median / times[OURS].median,
                    asked=ratio,
                    ceiling=times[THEIRS].median / times[LIMIT].median,
                )
            )
    if hot or kind not in ("int8", "int4"):
        return bars
    for threads, times in timings.items():
        what = f"{kind}, {threads} threads"
        asked_time = 0.55 if kind == "int8" else 0.45
        ours, fp32, limit = (times[name].median for name in (OURS, FP32, LIMIT))
        bars.append(
            Bar(
                name=f"{what}, over fp32",
                figure=ours / fp32,
                asked=asked_time,
                at_most=True,
                ceiling=limit / fp32,
            )
        )
        bars.append(Bar(name=f"{what}, over the memory limit", figure=ours / limit, asked=1.5, at_most=True))
    return bars


def quantising(shape: Shape, effort: Effort) -> tuple[dict[str, dict[str, Timing]], list[Bar]]:
    """Time the quantisation of one table, for each number of threads."""
    from meshrec.ops import nbit

    weight = torch.randn(shape.num_rows // 4, shape.dim)
    before, timings, bars = torch.get_num_threads(), {}, []
    torch.set_num_threads(1)
    for bits in (8, 4, 2):
        calls: dict[str, Callable[[], Any]] = {OURS: partial(nbit.quantize, weight, bits)}
        if importlib.util.find_spec("fbgemm_gpu") is not None:
            theirs = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf
            assert torch.equal(
                nbit.to_fbgemm_bytes(nbit.quantize(weight, bits), bits, shape.dim), theirs(weight, bits)
            )
            calls[THEIRS] = partial(theirs, weight, bits)
        times = timings[f"int{bits}"] = measure(calls, effort)
        if THEIRS in times:
            figure = times[THEIRS].median / times[OURS].median
            bars.append(Bar(name=f"int{bits}, quantising, 1 thread, vs FBGEMM", figure=figure, asked=1.0))
    torch.set_num_threads(before)
    return timings, bars


def report(title: str, timings: dict[int, dict[str, Timing]]) -> str:
    rows = [
        [name, *(f"{timings[threads][name].median:.2f}" for threads in THREADS)]
        for name in timings[THREADS[0]]
    ]
    return table([f"{title}: ms per call", "1 thread", "2 threads"], rows)


def run(effort: Effort, *, tiny: bool = False) -> Result:
    """Verify and time. ``tiny`` shrinks the tables, which only shows that the benchmark works."""
    shape = replace(Shape(), num_rows=1000, batch=32) if tiny else Shape()
    shapes = {"": shape, ", hot": replace(shape, num_tables=14, num_rows=shape.num_rows // 2, hot=2, bag=8)}
    figures: dict[str, Any] = {}
    bars: list[Bar] = []
    for title, each in shapes.items():
        batches, model = [Lookups(each, seed) for seed in range(NUM_BATCHES)], our_model(each)
        for kind in KINDS:
            if title and kind not in ("int8", "int4"):
                continue
            timings = time_kind(kind, batches, model, effort)
            print(report(kind + title, timings), end="\n\n", flush=True)
            figures[kind + title] = {n: {k: t._asdict() for k, t in by.items()} for n, by in timings.items()}
            bars += bars_of(kind, timings, hot=bool(title))
    times, more = quantising(shape, effort)
    figures["quantising"] = {
        kind: {name: each._asdict() for name, each in by.items()} for kind, by in times.items()
    }
    return Result(figures, bars + more)
