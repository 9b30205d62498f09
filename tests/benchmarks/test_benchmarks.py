"""The benches' own logic: what they verify before they time, and when a bar passes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.dlrm_step import speed_bars
from benchmarks.harness import Bar, Effort, Result, Timing, bars_table, measure, save
from benchmarks.memory_limit import MemoryLimit
from benchmarks.new_users import mean_ndcg
from benchmarks.tbe import CASES, LIMIT, Expected, bars_of, time_case, verify, verify_limit, with_one_limit
from benchmarks.tbe_contenders import Contender, Fbgemm, Lookups, MeshRec, Op, Shape, Torch

TINY = Shape(num_tables=2, num_rows=50, dim=64, batch=8, bag=3)


def test_contenders_take_turns() -> None:
    calls: list[str] = []
    timings = measure(
        {name: lambda name=name: calls.append(name) for name in "ab"}, Effort(rounds=2, calls=1, warm_ups=2)
    )
    assert calls == ["a", "a", "a", "b", "b", "b"] * 2
    assert all(timing.min <= timing.median for timing in timings.values())


@pytest.mark.parametrize(
    ("figure", "at_most", "met"),
    [(2.1, False, True), (1.9, False, False), (1.9, True, True), (2.1, True, False)],
)
def test_bar_passes_on_its_own_side(figure: float, at_most: bool, met: bool) -> None:
    bar = Bar(name="speed", figure=figure, asked=2, at_most=at_most)
    assert bar.met is met
    assert ("PASS" if met else "MISS") in bars_table([bar])


def test_bf16_is_compared_with_the_contenders_that_ran() -> None:
    rounds = {
        "dense alone bf16": [12.0] * 3,
        "mlps alone bf16": [10.0] * 3,
        "meshrec bf16": [20.0] * 3,
        "torchrec bf16": [60.0] * 3,
    }
    assert [bar.figure for bar in speed_bars(rounds)] == [3.0, 1.2]
    assert [bar.figure for bar in speed_bars({**rounds, "torchrec": [90.0] * 3})] == [3.0, 4.5, 1.2]


def test_results_are_saved_with_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    path = save("tbe", Result({"ms": 1.5}, [Bar(name="speed", figure=3, asked=2)]))
    report = json.loads(path.read_text())
    assert report["figures"] == {"ms": 1.5}
    assert report["bars"][0]["met"] is True


@pytest.mark.parametrize("contender", [MeshRec, Op, Torch])
@pytest.mark.parametrize("zipf", [None, 1.5])
def test_contenders_agree_with_the_formula(contender: type[Contender], zipf: float | None) -> None:
    lookups = Lookups(replace(TINY, zipf=zipf))
    it = contender(lookups)
    verify(it, Expected(lookups, it.weights))


class Faulty(Contender):
    """A right contender, damaged in one place."""

    def __init__(self, lookups: Lookups, fault: str) -> None:
        self._inner, self._fault = Torch(lookups), fault
        self.weights, self.rowwise = self._inner.weights, self._inner.rowwise
        touched = lookups.ids_per_table[1]
        untouched = torch.ones(lookups.shape.num_rows).index_fill(0, touched, 0).nonzero()
        self._row = {"a touched row": touched[0], "an untouched row": untouched[0, 0]}.get(fault)

    def forward(self) -> Tensor:
        return self._inner.forward() + (0.01 if self._fault == "the output" else 0)

    def step(self) -> None:
        self._inner.step()
        if self._row is not None:
            self.weights[1][self._row] += 0.001


@pytest.mark.parametrize("fault", ["the output", "a touched row", "an untouched row"])
def test_nothing_wrong_gets_as_far_as_the_clock(fault: str) -> None:
    lookups = Lookups(TINY)
    faulty = Faulty(lookups, fault)
    with pytest.raises(AssertionError, match="close"):
        verify(faulty, Expected(lookups, faulty.weights))


def test_fastest_way_is_the_memory_limit() -> None:
    slow, fast, ours = Timing(3.0, 2.0), Timing(2.0, 1.0), Timing(5.0, 5.0)
    both = {MeshRec.name: ours, f"{LIMIT}, a": slow, f"{LIMIT}, b": fast}
    assert with_one_limit(both) == {MeshRec.name: ours, LIMIT: fast}


def test_memory_limit_touches_the_rows_it_names() -> None:
    lookups = Lookups(TINY)
    weights = [torch.empty(50, 64) for _ in range(2)]
    lookups.fill(weights)
    limit = MemoryLimit(weights, lookups.ids_per_table)
    verify_limit(limit, lookups, weights)
    other = [weight + 1 for weight in weights]
    with pytest.raises(AssertionError, match="close"):
        verify_limit(limit, lookups, other)


def test_bars_compare_at_two_threads() -> None:
    def times(**median: float) -> dict[str, Timing]:
        return {name: Timing(each, each) for name, each in median.items()}

    one = times(meshrec=36.0, FBGEMM=1.0, torch=1.0) | {LIMIT: Timing(1.0, 1.0)}
    forward = times(meshrec=5.0, FBGEMM=8.0, torch=7.0) | {LIMIT: Timing(4.0, 4.0)}
    step = times(meshrec=20.0, FBGEMM=260.0, torch=900.0) | {LIMIT: Timing(10.0, 10.0)}
    bars = bars_of(1, CASES[1], {"forward": {1: one, 2: forward}, "step": {1: one, 2: step}})
    assert [bar.ceiling for bar in bars] == [26.0, 1.75, None, None, 0.1]
    assert {bar.name: (bar.figure, bar.met) for bar in bars} == {
        "1 forward + update vs FBGEMM": (13.0, True),
        "1 forward vs the faster of FBGEMM and torch": (1.4, True),
        "1 forward over the memory limit": (1.25, True),
        "1 forward + update over the memory limit": (2.0, False),
        "1 forward + update, 2 threads over 1": (1.8, True),
    }
    del forward["FBGEMM"], step["FBGEMM"]
    names = [
        bar.name for bar in bars_of(2, CASES[2], {"forward": {1: one, 2: forward}, "step": {1: one, 2: step}})
    ]
    assert names == ["2 forward vs torch", "2 forward + update, 2 threads over 1"]


def test_a_case_is_timed_for_every_contender() -> None:
    before = torch.get_num_threads()
    timings = time_case(Lookups(TINY), Effort(rounds=1, calls=1))
    assert torch.get_num_threads() == before
    for what in ("forward", "step"):
        for threads in (1, 2):
            assert {MeshRec.name, Op.name, Torch.name, LIMIT} <= timings[what][threads].keys()


@pytest.mark.peers
def test_fbgemm_agrees_with_the_formula() -> None:
    pytest.importorskip("fbgemm_gpu", reason="`make parity` installs it")
    lookups = Lookups(TINY)
    it = Fbgemm(lookups)
    verify(it, Expected(lookups, it.weights))


def test_ndcg_of_a_list_is_1_where_all_relevant_items_come_first() -> None:
    items = [*range(10)]
    assert mean_ndcg(items, [{0, 1, 2}]) == pytest.approx(1)
    assert mean_ndcg(items, [{1}, {10}]) == pytest.approx(0.5 / 1.5849625)
