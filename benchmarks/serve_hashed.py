"""A served model with hashed tables beside one with fixed tables: the start, and lookups.

Both packages have the same rows, are compiled, and give the vectors of their tables. Rows are drawn at random
from tables that no cache holds, and so many requests follow each other that no cache has the rows of one when
it comes again.
"""

import itertools
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import meshrec
from benchmarks.harness import Bar, Effort, Result, measure, table
from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from meshrec.export import Predictor, export


class Shape(NamedTuple):
    """The tables, and the requests."""

    num_tables: int = 4
    num_rows: int = 500_000
    dim: int = 64
    bag: int = 20
    batches: tuple[int, ...] = (16, 512)
    compile: bool = True
    bytes_between: int = 1 << 27
    """The bytes of rows that are read before a request comes again."""


TINY = Shape(2, 500, 8, 4, (3, 5), False, 1 << 10)


class Vectors(nn.Module):
    """Gives what its tables give."""

    def __init__(self, tables: EmbeddingBagCollection) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        return self.tables(sparse).values()


def run(effort: Effort, *, tiny: bool = False) -> Result:
    """Verify that both packages give the same vectors, then time both."""
    shape, threads = TINY if tiny else Shape(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own code
            return _measured(shape, Path(folder), effort)
    finally:
        torch.set_num_threads(threads)


def _measured(shape: Shape, folder: Path, effort: Effort) -> Result:
    generator = torch.Generator().manual_seed(1)
    ids = [_distinct(shape.num_rows, generator) for _ in range(shape.num_tables)]
    features = [f"f{t}" for t in range(shape.num_tables)]
    packages = {kind: _package(shape, kind, ids, folder / kind) for kind in ("fixed", "hashed")}
    starts = {
        kind: lambda package=package: Predictor(package, verify=False) for kind, package in packages.items()
    }
    start = measure(starts, Effort(rounds=effort.rounds, calls=1, warm_ups=1))
    fixed, hashed = (Predictor(package, verify=False) for package in packages.values())
    calls: dict[str, Callable[[], Tensor]] = {}
    for size in shape.batches:
        lengths = {f: torch.full((size,), shape.bag) for f in features}
        dense = torch.empty(size, 0)
        requests: dict[str, list[dict[str, Tensor]]] = {"fixed": [], "hashed": [], "hashed, 10 % unknown": []}
        for _ in range(1 + shape.bytes_between // (len(features) * size * shape.bag * shape.dim * 4)):
            rows = [torch.randint(shape.num_rows, (size * shape.bag,), generator=generator) for _ in features]
            known = [of_table[chosen] for of_table, chosen in zip(ids, rows, strict=True)]
            some = [each.clone() for each in known]
            for each in some:
                each[::10] = torch.randint(1 << 62, (len(each[::10]),), generator=generator)
            for values, kind in zip((rows, known, some), requests.values(), strict=True):
                kind.append(dict(zip(features, values, strict=True)))
        for name, all_of_them in requests.items():
            predictor = fixed if name == "fixed" else hashed
            calls[f"{name}, {size}"] = _in_turns(predictor, dense, all_of_them, lengths)
        assert torch.equal(calls[f"fixed, {size}"](), calls[f"hashed, {size}"]())
    times = measure(calls, effort)
    ratios = {}
    for size in shape.batches:
        own = times[f"fixed, {size}"].median
        for name in ("hashed", "hashed, 10 % unknown"):
            ratios[f"{name}, batch {size}"] = times[f"{name}, {size}"].median / own
    ratios["start"] = start["hashed"].median / start["fixed"].median
    lines = [[name, f"{each.median:.3f}"] for name, each in times.items()]
    lines += [[f"start, {name}", f"{each.median:.1f}"] for name, each in start.items()]
    print(table(["served", "ms"], lines), end="\n\n")
    bars = [
        Bar(name=f"hashed over fixed: {name}", figure=ratio, asked=1.25, at_most=True)
        for name, ratio in ratios.items()
    ]
    figures = {"ms": {name: each.median for name, each in (times | start).items()}, "ratios": ratios}
    return Result(figures, bars)


def _in_turns(
    predictor: Predictor, dense: Tensor, requests: list[dict[str, Tensor]], lengths: dict[str, Tensor]
) -> Callable[[], Tensor]:
    """Return a function that scores the next request."""
    turns = itertools.cycle(requests)
    return lambda: predictor(dense, next(turns), lengths)


def _distinct(count: int, generator: torch.Generator) -> Tensor:
    found = torch.randint(-(1 << 62), 1 << 62, (count,), generator=generator).unique()
    assert len(found) == count
    return found[torch.randperm(count, generator=generator)]


def _package(shape: Shape, kind: str, ids: list[Tensor], folder: Path) -> Path:
    size = {"num_embeddings": shape.num_rows}
    if kind == "hashed":
        size = {"keys": meshrec.Hashed(max_rows=shape.num_rows)}
    configs = [
        EmbeddingBagConfig(name=f"t{t}", embedding_dim=shape.dim, feature_names=[f"f{t}"], **size)
        for t in range(shape.num_tables)
    ]
    tables = EmbeddingBagCollection(configs)
    state = {}
    for t, own in enumerate(ids):
        rows = torch.randn(shape.num_rows, shape.dim, generator=torch.Generator().manual_seed(t))
        state[f"embedding_bags.t{t}.weight"] = rows
        if kind == "hashed":
            state[f"embedding_bags.t{t}.ids"] = own
    tables.load_state_dict(state)
    features = [f"f{t}" for t in range(shape.num_tables)]
    model = Vectors(tables).eval()
    return export(model, folder, features=features, num_dense=0, scores=None, compile=shape.compile)
