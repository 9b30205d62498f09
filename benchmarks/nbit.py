"""Lookups of quantised rows, against FBGEMM, our fp32 tables and the memory limit."""

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Bar, Effort, Result, Timing, configs, in_turn, table
from benchmarks.memory_limit import PREFETCHES, LineLimit, Prefetch
from benchmarks.tbe import LIMIT, THREADS, at_threads
from benchmarks.tbe_contenders import Lookups, Shape

KINDS = {"int8": 8, "int4": 4}
FP32 = "meshrec, fp32"
OURS, THEIRS = "meshrec", "FBGEMM"
SHAPE = Shape(num_tables=4, num_rows=500_000, dim=64, batch=2048, bag=20)
"""At 8 bits, the rows take four times a last-level cache of 32 MiB."""
NUM_BATCHES = 4
"""Batches used in turn, because the rows of a single one would stay in the last-level cache."""


def batch_of(shape: Shape, seed: int = 0) -> Lookups:
    """Return a batch with int32 IDs, as they are served."""
    lookups = Lookups(shape, seed)
    lookups.ids, lookups.offsets = lookups.ids.int(), lookups.offsets.int()
    return lookups


def our_model(shape: Shape) -> Any:
    import meshrec

    torch.manual_seed(1)
    limits = {"weight_init_min": -0.1, "weight_init_max": 0.1}
    return meshrec.EmbeddingBagCollection(configs(shape.num_tables, shape.num_rows, shape.dim, **limits))


def our_call(model: Any, lookups: Lookups) -> Callable[[], Tensor]:
    """Return a call of our public module, which makes a new KeyedJaggedTensor each time."""
    return torch.inference_mode()(lambda: model(lookups.features()).values())


def their_op(weights: list[Tensor], bits: int, shape: Shape) -> Any:
    """FBGEMM's lookup of the same rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fbgemm_gpu import split_table_batched_embeddings_ops_inference as inference
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation

    kind = getattr(inference.SparseType, f"INT{bits}")
    specs = [
        (f"t{t}", shape.num_rows, shape.dim, kind, EmbeddingLocation.HOST) for t in range(shape.num_tables)
    ]
    op = inference.IntNBitTableBatchedEmbeddingBagsCodegen(
        specs, output_dtype=inference.SparseType.FP32, device="cpu"
    )
    op.fill_random_weights()
    for weight, (memory, params) in zip(weights, op.split_embedding_weights(), strict=True):
        if params is None:  # a row begins with its scale and its bias, as ours does
            memory.copy_(weight[:, : memory.shape[1]])
        else:
            params.copy_(weight[:, :4])
            memory.copy_(weight[:, 4 : 4 + memory.shape[1]])
    return op


def their_call(op: Any, lookups: Lookups) -> Callable[[], Tensor]:
    return torch.inference_mode()(lambda: op(lookups.ids, lookups.offsets))


def time_kind(
    kind: str, batches: Sequence[Lookups], model: Any, effort: Effort
) -> dict[int, dict[str, Timing]]:
    """Compare the sums with those of the decoded rows and of FBGEMM, then time."""
    from meshrec import DataType
    from meshrec.quant import quantize

    quantized = quantize(model, DataType[kind.upper()], output_dtype=DataType.FP32)
    rows = [weight.detach() for _, weight in quantized.tables().values()]
    makers: dict[str, Callable[[Lookups], Callable[[], Tensor]]] = {OURS: partial(our_call, quantized)}
    if importlib.util.find_spec("fbgemm_gpu") is not None:
        makers[THEIRS] = partial(their_call, their_op(rows, KINDS[kind], batches[0].shape))
    for lookups in batches:
        verify({name: make(lookups) for name, make in makers.items()}, rows, KINDS[kind], lookups)
    makers[FP32] = partial(our_call, model)
    calls = {name: in_turn([make(lookups) for lookups in batches]) for name, make in makers.items()}
    limits = [LineLimit(rows, lookups.ids_per_table) for lookups in batches]
    for prefetch in (*PREFETCHES, Prefetch(64, True)):
        calls[f"{LIMIT}, {prefetch}"] = in_turn([partial(limit.forward, prefetch) for limit in limits])
    return at_threads(calls, effort)


def verify(calls: dict[str, Callable[[], Tensor]], rows: list[Tensor], bits: int, lookups: Lookups) -> None:
    from meshrec.ops import nbit

    shape = lookups.shape
    values = [
        nbit.dequantize(table_rows[ids.long()], bits, shape.dim)
        for table_rows, ids in zip(rows, lookups.ids_per_table, strict=True)
    ]
    sums = [each.double().view(shape.batch, shape.bag, shape.dim).sum(1) for each in values]
    expected = torch.cat(sums, 1).float()
    scale = float(expected.abs().max())
    for call in calls.values():
        torch.testing.assert_close(call(), expected, rtol=1e-6, atol=3e-7 * scale)


def bars_of(kind: str, timings: dict[int, dict[str, Timing]]) -> list[Bar]:
    bars = []
    for number, timed in timings.items():
        times, what = {name: each.median for name, each in timed.items()}, f"{kind}, {number} threads"
        if THEIRS in times:
            figure, ceiling = (times[THEIRS] / times[name] for name in (OURS, LIMIT))
            bars.append(Bar(f"{what}, vs FBGEMM", figure, 1.0 if number == 1 else 1.7, ceiling=ceiling))
        figure, ceiling = (times[name] / times[FP32] for name in (OURS, LIMIT))
        asked = 0.55 if kind == "int8" else 0.45
        bars.append(Bar(f"{what}, over fp32", figure, asked, at_most=True, ceiling=ceiling))
        bars.append(Bar(f"{what}, over the memory limit", times[OURS] / times[LIMIT], 1.5, at_most=True))
    return bars


def run(effort: Effort, *, tiny: bool = False) -> Result:
    """Verify and time. ``tiny`` shrinks the tables, which only shows that the benchmark works."""
    shape = replace(SHAPE, num_rows=1000, batch=32) if tiny else SHAPE
    batches, model = [batch_of(shape, seed) for seed in range(NUM_BATCHES)], our_model(shape)
    figures: dict[str, Any] = {}
    bars: list[Bar] = []
    for kind in KINDS:
        timings = figures[kind] = time_kind(kind, batches, model, effort)
        rows = [[name, *(f"{timings[n][name].median:.2f}" for n in THREADS)] for name in timings[1]]
        print(table([f"{kind}: ms per call", "1 thread", "2 threads"], rows), end="\n\n", flush=True)
        bars += bars_of(kind, timings)
    return Result(figures, bars)
