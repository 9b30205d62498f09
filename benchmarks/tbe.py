"""Lookups of many tables, with and without an update, against FBGEMM, plain torch and the memory limit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Bar, Effort, Result, Timing, measure, selected, table, threads
from benchmarks.memory_limit import PREFETCHES, MemoryLimit
from benchmarks.tbe_contenders import EPS, LR, Contender, Fbgemm, Lookups, MeshRec, Shape, Torch, classes

LIMIT = "memory limit"
THREADS = (1, 2)

Timings = dict[int, dict[str, Timing]]  # threads -> contender -> timing


@dataclass(frozen=True, kw_only=True)
class Case:
    """A shape, and the speed-ups over the peers that its bars ask for."""

    shape: Shape
    step_vs_fbgemm: float
    forward_vs_best: float
    near_limit: bool = False


SMALL = Shape(num_tables=8, num_rows=100_000, dim=64, batch=2048, bag=20)
CASES = {
    1: Case(shape=SMALL, step_vs_fbgemm=12, forward_vs_best=1.2, near_limit=True),
    2: Case(shape=replace(SMALL, zipf=1.2), step_vs_fbgemm=5, forward_vs_best=1),
    3: Case(shape=replace(SMALL, num_tables=26, dim=128, bag=1), step_vs_fbgemm=4, forward_vs_best=1.2),
    4: Case(
        shape=replace(SMALL, num_rows=1_000_000), step_vs_fbgemm=12, forward_vs_best=1.1, near_limit=True
    ),
    5: Case(shape=replace(SMALL, num_tables=1, num_rows=1_000_000), step_vs_fbgemm=8, forward_vs_best=1),
}


class Expected:
    """Expected results in float64: the sums, and the touched rows after some steps."""

    def __init__(self, lookups: Lookups, weights: list[Tensor]) -> None:
        shape = lookups.shape
        samples = torch.arange(shape.batch).repeat_interleave(shape.bag)
        sums, self.touched, self._before, self._grads = [], [], [], []
        for ids, weight, grad in zip(
            lookups.ids_per_table, weights, lookups.grad.double().chunk(shape.num_tables, dim=1), strict=True
        ):
            rows, inverse = ids.unique(return_inverse=True)
            before = weight[rows].double()
            sums.append(grad.new_zeros(grad.shape).index_add_(0, samples, before[inverse]))
            self.touched.append(rows)
            self._before.append(before)
            self._grads.append(torch.zeros_like(before).index_add_(0, inverse, grad[samples]))
        self.out = torch.cat(sums, dim=1)

    def rows_after(self, num_steps: int, *, rowwise: bool) -> list[Tensor]:
        """Apply w -= lr * g / (sqrt(s) + eps) with s += g^2, or s += mean(g^2) over the row if
        ``rowwise``.
        """
        after = []
        for before, grad in zip(self._before, self._grads, strict=True):
            square = grad.square().mean(dim=1, keepdim=True) if rowwise else grad.square()
            rates = sum(LR / ((step * square).sqrt() + EPS) for step in range(1, num_steps + 1))
            after.append(before - rates * grad)
        return after


def verify(contender: Contender, expected: Expected, num_steps: int = 2) -> None:
    """Compare outputs, the touched rows after ``num_steps`` steps, and the sum of the untouched rows."""
    torch.testing.assert_close(contender.forward().detach(), expected.out.float(), rtol=1e-4, atol=1e-5)
    totals = [weight.double().sum() for weight in contender.weights]
    before = [
        weight[rows].double().sum() for weight, rows in zip(contender.weights, expected.touched, strict=True)
    ]
    for _ in range(num_steps):
        contender.step()
    after = expected.rows_after(num_steps, rowwise=contender.rowwise)
    for weight, rows, wanted, total, moved in zip(
        contender.weights, expected.touched, after, totals, before, strict=True
    ):
        torch.testing.assert_close(weight[rows], wanted.float(), rtol=1e-3, atol=2e-5)
        untouched = weight.double().sum() - weight[rows].double().sum()
        torch.testing.assert_close(untouched, total - moved, rtol=1e-9, atol=1e-6)


def verify_limit(limit: MemoryLimit, lookups: Lookups, weights: list[Tensor]) -> None:
    """Check that the memory loop reads each looked-up row, and writes each distinct row once."""
    read = sum(weight[ids].double().sum() for weight, ids in zip(weights, lookups.ids_per_table, strict=True))
    torch.testing.assert_close(torch.tensor(limit.forward()), read.float(), rtol=1e-2, atol=1.0)
    rows = lookups.ids_per_table[0][:1000].unique()
    before = weights[0][rows]
    limit.add(1.0)
    torch.testing.assert_close(weights[0][rows], before + 1)
    limit.add(-1.0)


def time_case(lookups: Lookups, effort: Effort) -> dict[str, Timings]:
    """Verify, then time: "forward" and "step" -> threads -> contender -> timing."""
    contenders = {kind.name: kind(lookups) for kind in classes()}
    weights = contenders[MeshRec.name].weights
    expected = Expected(lookups, weights)
    for contender in contenders.values():
        verify(contender, expected)
    limit = MemoryLimit(weights, lookups.ids_per_table)
    verify_limit(limit, lookups, weights)

    calls: dict[str, dict[str, Callable[[], Any]]] = {
        "forward": {name: torch.no_grad()(each.forward) for name, each in contenders.items()},
        "step": {name: each.step for name, each in contenders.items()},
    }
    for prefetch in PREFETCHES:
        calls["forward"][f"{LIMIT}, {prefetch}"] = partial(limit.forward, prefetch)
        calls["step"][f"{LIMIT}, {prefetch}"] = partial(limit.step, prefetch)
    return {what: at_threads(of_kind, effort) for what, of_kind in calls.items()}


def at_threads(calls: Mapping[str, Callable[[], Any]], effort: Effort) -> Timings:
    """Time calls with each number of threads. The loops that touch the rows become one, the fastest."""
    timings = {}
    for number in THREADS:
        with threads(number):
            timings[number] = with_one_limit(measure(calls, effort))
    return timings


def with_one_limit(times: Mapping[str, Timing]) -> dict[str, Timing]:
    """Replace the loops that touch the rows by the fastest of them."""
    rest = {name: timing for name, timing in times.items() if not name.startswith(LIMIT)}
    return rest | {LIMIT: min(timing for name, timing in times.items() if name not in rest)}


def bars_of(number: int, case: Case, timings: dict[str, Timings]) -> list[Bar]:
    forward, step = ({name: t.median for name, t in timings[what][2].items()} for what in ("forward", "step"))
    ours, both = MeshRec.name, f"{number} forward + update"
    bars = []
    if Fbgemm.name in step:
        figure, ceiling = (step[Fbgemm.name] / step[name] for name in (ours, LIMIT))
        bars.append(Bar(f"{both} vs FBGEMM", figure, case.step_vs_fbgemm, ceiling=ceiling))
    best = min(forward[name] for name in (Fbgemm.name, Torch.name) if name in forward)
    peers = "the faster of FBGEMM and torch" if Fbgemm.name in forward else "torch"
    figure, ceiling = (best / forward[name] for name in (ours, LIMIT))
    bars.append(Bar(f"{number} forward vs {peers}", figure, case.forward_vs_best, ceiling=ceiling))
    if case.near_limit:
        for what, times in ((f"{number} forward", forward), (both, step)):
            bars.append(Bar(f"{what} over the memory limit", times[ours] / times[LIMIT], 1.5, at_most=True))
    figure, ceiling = (timings["step"][1][name].median / step[name] for name in (ours, LIMIT))
    bars.append(Bar(f"{both}, 2 threads over 1", figure, 1.7, ceiling=ceiling))
    return bars


def report(timings: dict[str, Timings]) -> str:
    rows = []
    for what, label in (("forward", "forward"), ("step", "forward + update")):
        one, two = (timings[what][number] for number in THREADS)
        for name in one:
            cells = [f"{ms:.2f}" for ms in (*one[name], *two[name])]
            rows.append([f"{label}: {name}", *cells, f"{one[name].median / two[name].median:.2f}x"])
    return table(["ms per call", "1 thread", "min", "2 threads", "min", "scaling"], rows)


def run(effort: Effort, *, tiny: bool = False, only: Sequence[str] = ()) -> Result:
    """Verify and time the cases. ``tiny`` shrinks them, which only shows that the benchmark works."""
    figures: list[dict[str, Any]] = []
    bars: list[Bar] = []
    for number in map(int, selected([str(number) for number in CASES], only)):
        case = CASES[number]
        shape = replace(case.shape, num_rows=1000, batch=64) if tiny else case.shape
        print(f"case {number}: {shape}", flush=True)
        timings = time_case(Lookups(shape), effort)
        print(report(timings), end="\n\n", flush=True)
        figures.append({"case": number, **asdict(shape), "ms": timings})
        bars += bars_of(number, case, timings)
    return Result(figures, bars)
