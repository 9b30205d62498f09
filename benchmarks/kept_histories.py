"""Requests of users with long histories: from kept keys and values, against encoding the history again.

The next-item model gives the query of a history that grew by one item. The ranker scores 500 candidates after
a history of 200, against encoding the history in every request, and against one sequence per candidate.
"""

import dataclasses
from functools import partial
from typing import Any

import torch

from benchmarks.harness import Bar, Effort, Result, measure, table
from meshrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from meshrec.models import HSTU, HistoryFeatures, HSTURanker, KeptTokens, RankerFeatures

NUM_ITEMS, WIDTH = 10_000, 64
PUBLISHED = 256  # width of the next-item model for ML-20M, which has 4 layers of 4 heads
LONGEST, CANDIDATES = 200, 500


def features_of(bags: dict[str, list[list[int]]]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        list(bags),
        torch.tensor([each for feature in bags.values() for bag in feature for each in bag]),
        lengths=torch.tensor([len(bag) for feature in bags.values() for bag in feature]),
        stride=len(next(iter(bags.values()))),
    )


def next_items(num_items: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ways to compute the query of a history that grew by one item, and their results."""
    torch.manual_seed(0)
    config = EmbeddingConfig(
        name="items", num_embeddings=NUM_ITEMS, embedding_dim=PUBLISHED, feature_names=["history", "item"]
    )
    model = HSTU(
        EmbeddingCollection(tables=[config]),
        HistoryFeatures("history", "item", times="times"),
        max_length=num_items,
        num_blocks=4,
        num_heads=4,
    ).eval()
    items = torch.randint(0, NUM_ITEMS, (num_items,)).tolist()
    times = (1000 * torch.arange(num_items)).tolist()
    before = features_of({"history": [items[:-1]], "item": [[]], "times": [times[:-1]]})
    now = features_of({"history": [items], "item": [[]], "times": [times]})
    kept = model.advance(before, KeptTokens.none(model.kept_shape, 1)).kept
    calls = {"again": lambda: model.query_vectors(now), "kept": lambda: model.advance(now, kept).query_BV}
    return calls, {name: call() for name, call in calls.items()}


def ranked(num_items: int, num_candidates: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ways to score candidates, and their results."""
    torch.manual_seed(0)
    names = {"user": ["user"], "items": ["history", "item"], "action": ["action"]}
    configs = [
        EmbeddingConfig(name=name, num_embeddings=NUM_ITEMS, embedding_dim=WIDTH, feature_names=features)
        for name, features in names.items()
    ]
    model = HSTURanker(
        EmbeddingCollection(tables=configs),
        RankerFeatures(("user",), ("history",), ("item",), ("action",), "times"),
        max_length=num_items,
        max_candidates=num_candidates,
        width=WIDTH,
    ).eval()
    items = torch.randint(0, NUM_ITEMS, (num_items,)).tolist()
    times = (1000 * torch.arange(num_items)).tolist()
    candidates = torch.randint(0, NUM_ITEMS, (num_candidates,)).tolist()

    def request(repeats: int) -> KeyedJaggedTensor:
        of_each = [candidates] if repeats == 1 else [[each] for each in candidates]
        return features_of(
            {
                "user": [[1]] * repeats,
                "history": [items] * repeats,
                "item": of_each,
                "action": [[each % 2 for each in items]] * repeats,
                "times": [times + [10**6] * len(own) for own in of_each],
            }
        )

    one, many = request(1), request(num_candidates)
    kept = model.keep(one)
    calls = {
        "each alone": partial(model.logits, many),
        "again": partial(model.logits, one),
        "kept": partial(model.score, one, kept),
    }
    return calls, {name: call() for name, call in calls.items()}


@torch.inference_mode()
def run(effort: Effort, *, tiny: bool = False) -> Result:
    """Compare the results, then measure. ``tiny`` shortens histories: it only tries the benchmark."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if tiny else 2)
    num_items, num_candidates = (10, 6) if tiny else (LONGEST, CANDIDATES)
    effort = dataclasses.replace(effort, warm_ups=min(effort.warm_ups, 2))
    kinds = {"next item": next_items(num_items), "ranker": ranked(num_items, num_candidates)}
    figures: dict[str, Any] = {}
    bars, rows = [], []
    for kind, (calls, results) in kinds.items():
        for name in calls:
            torch.testing.assert_close(results[name], results["kept"], rtol=1e-5, atol=1e-5)
        times = measure(calls, effort)
        figures[kind] = {name: each._asdict() for name, each in times.items()}
        rows += [[f"{kind}, {name}", f"{each.median:.2f}"] for name, each in times.items()]
        slowest = next(iter(calls))
        figure = times[slowest].median / times["kept"].median
        bars.append(Bar(name=f"{kind}: {slowest} over kept", figure=figure, asked=5.0))
    torch.set_num_threads(before)
    print(table([f"history of {num_items}", "ms per request"], rows), end="\n\n", flush=True)
    return Result(figures, bars)
