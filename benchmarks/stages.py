"""Two stages on two cores with one thread each, beside one worker that runs the same splits one after the
other.

A second core is seldom free. Two busy loops are timed against one in every round, and the figures allow for
what they lose. Results are compared before anything is timed.
"""

import copy
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import meshrec
from benchmarks.harness import Bar, Effort, Result, table
from meshrec.models.dlrm import DLRM
from meshrec.pipeline.stages import Staged, StageLink
from meshrec.pipeline.stages.profiling import CANDIDATES, choose_for
from meshrec.pipeline.stages.samples import num_samples
from meshrec.pipeline.stages.staged import take_apart

SPLITS = (4, 8, 16, 32)


def mlp(tiny: bool) -> tuple[nn.Module, tuple[Any, ...], list[str]]:
    """Build an MLP of eight equal layers."""
    width, batch = (16, 64) if tiny else (768, 2048)
    layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers), (torch.randn(batch, width),), ["8"]


def convolutions(tiny: bool) -> tuple[nn.Module, tuple[Any, ...], list[str]]:
    """Build a chain of residual convolution blocks."""
    channels, size, batch = (4, 8, 64) if tiny else (48, 16, 256)
    return (
        nn.Sequential(*(Residual(channels) for _ in range(6))),
        (torch.randn(batch, channels, size, size),),
        ["3"],
    )


class Residual(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, channels, 3, padding=1)
        self.two = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, channels, H, W] to the same shape."""
        return torch.relu(x + self.two(torch.relu(self.one(x))))


def dlrm(tiny: bool) -> tuple[nn.Module, tuple[Any, ...]]:
    """Build a DLRM: tables beside a bottom MLP."""
    batch, width = (64, 8) if tiny else (4096, 64)
    tables = [
        meshrec.EmbeddingBagConfig(
            name=f"t{i}", embedding_dim=width, num_embeddings=10_000, feature_names=[f"f{i}"]
        )
        for i in range(8)
    ]
    model = DLRM(meshrec.EmbeddingBagCollection(tables), 13, [512, 256, width], [512, 512, 256, 256, 1])
    lengths = torch.full((8 * batch,), 2)
    ids = torch.randint(0, 10_000, (16 * batch,))
    sparse = meshrec.KeyedJaggedTensor.from_lengths_sync([f"f{i}" for i in range(8)], ids, lengths)
    return model, (torch.randn(batch, 13), sparse)


def step(model: nn.Module, inputs: tuple[Any, ...]) -> float:
    """Return the seconds of a forward and backward pass."""
    for parameter in model.parameters():
        parameter.grad = None
    start = time.perf_counter()
    model(*inputs).square().mean().backward()
    return time.perf_counter() - start


def freedom() -> float:
    """Return the share of two cores that two busy loops get; 1 if the second core is free."""

    def loop(results: list[float]) -> None:
        a, start = torch.randn(256, 256), time.perf_counter()
        for _ in range(60):
            a = torch.tanh(a @ a)
        results.append(time.perf_counter() - start)

    alone: list[float] = []
    both: list[float] = []
    loop(alone)
    threads = [threading.Thread(target=loop, args=(both,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return min(1.0, alone[0] / statistics.mean(both))


class SlowLink(StageLink):
    """A link whose copies take time, but no core."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def ready(self, value: Any) -> Any: ...

    def carry(self, value: Any, ready: Any, destination: torch.device) -> Callable[[], Any]:
        """Return a copy after ``seconds``."""
        time.sleep(self.seconds)
        return lambda: value


def rounds(contenders: dict[str, Callable[[], float]], effort: Effort) -> tuple[dict[str, float], float]:
    """Return the median seconds of contenders that take turns, and the median of `freedom` meanwhile."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    free = []
    for call in contenders.values():
        call()
    for _ in range(effort.rounds * effort.calls):
        free.append(freedom())
        for name, call in contenders.items():
            seconds[name].append(call())
    return {name: statistics.median(own) for name, own in seconds.items()}, statistics.median(free)


def verify(model: nn.Module, inputs: tuple[Any, ...], cuts: list[str]) -> None:
    """Check that two workers give the bits of one, and in float64 the gradients of the unsplit model to
    1e-12.
    """
    batch = num_samples(inputs)
    assert batch is not None
    both = [Staged(copy.deepcopy(model), cuts=cuts, split_size=batch // 5, num_workers=n) for n in (None, 1)]
    for staged in both:
        step(staged, inputs)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(*(s.parameters() for s in both), strict=True))
    plain = copy.deepcopy(model).double()
    staged = Staged(copy.deepcopy(plain), cuts=cuts, split_size=batch // 5)
    doubled = tuple(each.double() for each in inputs)
    step(plain, doubled)
    step(staged, doubled)
    for one, other in zip(plain.parameters(), staged.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-12, atol=1e-15)


def balance(staged: Staged, inputs: tuple[Any, ...]) -> float:
    """Return the balance: the slower stage's share of the work if both were alike, over its real share."""
    step(staged, inputs)
    own = [0.0, 0.0]
    for event in staged.timeline.events:
        own[event.stage] += event.end - event.start
    return sum(own) / 2 / max(own)


def run(effort: Effort, *, tiny: bool = False) -> Result:
    """Run all measurements of stages."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(effort, tiny)
    finally:
        torch.set_num_threads(before)


def _run(effort: Effort, tiny: bool) -> Result:
    bars: list[Bar] = []
    rows: list[list[str]] = []
    for name, (model, inputs, cuts) in {"MLP": mlp(tiny), "convolutions": convolutions(tiny)}.items():
        verify(model, inputs, cuts)
        batch = num_samples(inputs)
        assert batch is not None
        for count in SPLITS:
            contenders = {
                label: Staged(copy.deepcopy(model), cuts=cuts, split_size=batch // count, num_workers=workers)
                for label, workers in (("one", 1), ("two", None))
            }
            even = balance(contenders["one"], inputs)
            times, free = rounds({n: lambda s=s, x=inputs: step(s, x) for n, s in contenders.items()}, effort)  # type: ignore[misc]
            gain, ideal = times["one"] / times["two"], 2 * count / (count + 1) * even
            rows.append(
                [f"{name}, {count} splits", *(f"{v:.3f}" for v in (gain, ideal, free, gain / ideal / free))]
            )
            asked = 0.95 * ideal * free if count != 16 else 1.8 * free
            bars.append(
                Bar(name=f"{name}, {count} splits, over one worker", figure=gain, asked=round(asked, 3))
            )
        bars.append(_copied(name, model, inputs, cuts, effort))
        bars += _predicted(name, model, inputs, cuts, effort)
    bars.append(_branches(tiny))
    print(table(["two stages over one worker", "gain", "ideal", "cores free", "of ideal"], rows), flush=True)
    return Result(rows, bars)


def _copied(name: str, model: nn.Module, inputs: tuple[Any, ...], cuts: list[str], effort: Effort) -> Bar:
    """Time copies that take half as long as a stage needs for a split, against no copies."""
    batch = num_samples(inputs)
    assert batch is not None
    link = SlowLink()
    slow = Staged(copy.deepcopy(model), cuts=cuts, split_size=batch // 16, link=link)
    plain = Staged(copy.deepcopy(model), cuts=cuts, split_size=batch // 16)
    link.seconds = min(step(plain, inputs) for _ in range(4)) / 16 / 3 / 2  # a third of a split is forward
    contenders = {"plain": lambda: step(plain, inputs), "slow": lambda: step(slow, inputs)}
    times, _ = rounds(contenders, effort)
    return Bar(
        name=f"{name}, 16 splits, with copies",
        figure=times["plain"] / times["slow"],
        asked=0.95,
        # The first split's way forward, and the last one's back, hide behind nothing.
        ceiling=times["plain"] / (times["plain"] + 2 * link.seconds),
    )


def _predicted(
    name: str, model: nn.Module, inputs: tuple[Any, ...], cuts: list[str], effort: Effort
) -> list[Bar]:
    """Compare the predicted with the measured step at each number of splits, and the chosen number with the
    best.
    """
    batch = num_samples(inputs)
    assert batch is not None
    counts = [count for count in CANDIDATES if count <= 32]
    each = {k: Staged(copy.deepcopy(model), cuts=cuts, split_size=batch // k) for k in counts}
    own = next(iter(each.values()))
    taken = take_apart(own._traced.taking, inputs, {})
    found: list[dict[int, float]] = []
    seconds: dict[str, list[float]] = {str(k): [] for k in counts}
    for _ in range(3):  # a slow minute meets predictions and steps
        choice = choose_for(
            own._traced, taken, batch, num_stages=2, staging=own._staging, split_size="auto", num_threads=1
        )
        found.append(choice.predicted)
        times, _ = rounds({str(k): lambda s=s: step(s, inputs) for k, s in each.items()}, effort)  # type: ignore[misc]
        for k, median in times.items():
            seconds[k].append(median)
    times = {k: statistics.median(own_times) for k, own_times in seconds.items()}
    predicted = {k: statistics.median(each[k] for each in found) for k in counts}
    print(
        table(
            [f"{name}, splits", "predicted [ms]", "measured [ms]"],
            [[str(k), f"{1e3 * predicted[k]:.0f}", f"{1e3 * times[str(k)]:.0f}"] for k in counts],
        ),
        flush=True,
    )
    worst = max(abs(predicted[k] / times[str(k)] - 1.0) for k in counts)
    chosen = min(counts, key=lambda k: predicted[k])
    return [
        Bar(name=f"{name}, predicted step, worst", figure=100 * worst, asked=10, unit="%", at_most=True),
        Bar(
            name=f"{name}, chosen splits over the best",
            figure=100 * (times[str(chosen)] / min(times.values()) - 1),
            asked=3,
            unit="%",
            at_most=True,
        ),
    ]


def _branches(tiny: bool) -> Bar:
    model, inputs = dlrm(tiny)
    staged = Staged(model, num_stages=2)
    staged(*inputs)
    assert staged.choice is not None
    return Bar(
        name="gap of the cut of a DLRM", figure=100 * staged.choice.gap, asked=2, unit="%", at_most=True
    )
