"""Share of bags that could be looked up before the update of the previous batch, and the time that would
save.

A bag is early when the previous batch touches none of its rows. Early bags take the bytes of their embeddings
off the critical path, but not the latency, because the other bags still follow the update. Let C be the time
of a step without a network, a = C/4 its latency, and e the time for a step's embeddings, which equals that
for their gradients. A pipelined step takes C + 2a + 2e; early bags save e times their share.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Effort, Result, table
from meshrec.data.synthetic import zipf
from meshrec.sparse import KeyedJaggedTensor
from meshrec.train import resolve

CRITEO_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
"""Number of rows of the 26 categorical columns of the Criteo Kaggle data."""
EXPONENT = 1.05
BATCHES = (1024, 4096, 16384)
NETWORKS = {"e = C/20": 0.05, "e = C/4": 0.25, "e = C/2": 0.5}
_LATENCY = 0.25
_WORTH = 0.10
_NUM_BATCHES = 6


def movielens(batch: int) -> Iterator[KeyedJaggedTensor]:
    """Yield the batches of the MovieLens recipe in its order."""
    for number, each in enumerate(resolve("movielens_dlrm").data.load().train.batches(batch)):
        if number == _NUM_BATCHES or len(each) < batch:
            return
        yield each.sparse


def criteo(batch: int) -> Iterator[KeyedJaggedTensor]:
    """Yield batches of one ID per column, drawn by Zipf's law."""
    generator = torch.Generator().manual_seed(0)
    names = [f"c{i}" for i in range(len(CRITEO_ROWS))]
    for _ in range(_NUM_BATCHES):
        uniform = torch.rand(len(CRITEO_ROWS), batch, generator=generator, dtype=torch.float64).numpy()
        ids = [
            torch.from_numpy(zipf(u, rows, EXPONENT)) for u, rows in zip(uniform, CRITEO_ROWS, strict=True)
        ]
        yield KeyedJaggedTensor(
            names, torch.cat(ids), lengths=torch.ones(len(names) * batch, dtype=torch.int32)
        )


def early_share(batches: Iterable[KeyedJaggedTensor]) -> float:
    """Return the share of non-empty bags without a row of the previous batch."""
    early = total = 0
    before: KeyedJaggedTensor | None = None
    for features in batches:
        if before is not None:
            for key in features.keys():  # noqa: SIM118 - no dict
                lengths, ids = features[key].lengths(), features[key].values()
                touched = torch.isin(ids, before[key].values())
                bags = torch.repeat_interleave(torch.arange(lengths.numel()), lengths.long())
                late = torch.zeros(lengths.numel(), dtype=torch.int64).index_add_(0, bags, touched.long())
                filled: Tensor = lengths > 0
                early += int((filled & (late == 0)).sum())
                total += int(filled.sum())
        before = features
    return early / total if total else 0.0


def gain(share: float, exchange: float) -> float:
    """Return the saving of early bags as a share of the step; ``exchange`` is e / C."""
    step = 1 + 2 * _LATENCY + 2 * exchange
    return share * exchange / step


def run(effort: Effort, *, tiny: bool = False) -> Result:
    """Print the shares and the savings. There is nothing to time."""
    figures: dict[str, Any] = {}
    rows = []
    for name, source in {"MovieLens": movielens, "Criteo-shaped": criteo}.items():
        for batch in BATCHES[:1] if tiny else BATCHES:
            share = early_share(source(batch))
            gains = {network: gain(share, exchange) for network, exchange in NETWORKS.items()}
            figures[f"{name}, batch {batch}"] = {"share": share, "gains": gains}
            rows.append(
                [f"{name}, batch {batch:,}", f"{share:.1%}", *(f"{each:.1%}" for each in gains.values())]
            )
    print(table(["data", "early bags", *(f"gain at {name}" for name in NETWORKS)], rows))
    print(f"worth building from {_WORTH:.0%} on", flush=True)
    return Result(figures, [])
