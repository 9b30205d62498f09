"""The trainer beside a bare loop with the same model, optimizers and batches on 2 ranks, in turns."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.dlrm_contenders import LR, TINY, Shape, keyed, make_inputs
from benchmarks.harness import Bar, Effort, Result, table
from meshrec.data import Batch, Dataset, Feature, Position, Reader, RowsOfFile
from meshrec.optim import RowWiseAdagrad
from meshrec.sparse import KeyedJaggedTensor
from meshrec.testing.rank_pool import RankPool
from meshrec.train import DataSource, DenseOptimizer, DLRMConfig, Recipe, Trainer, Training, join
from meshrec.train.progress import Progress

_STEPS = 20


class Measured(NamedTuple):
    """Seconds per step by round on one rank."""

    trainer: list[float]
    bare: list[float]


class Repeated(Reader):
    """A dataset of four batches of this rank, repeated, as in the step benchmark."""

    def __init__(self, shape: Shape) -> None:
        self.prepared = [_batch(shape, number) for number in range(4)]
        self._batch_size = shape.batch

    @property
    def num_samples(self) -> int:
        return _STEPS * self._batch_size * dist.get_world_size()

    @property
    def files(self) -> list[RowsOfFile]:
        return [RowsOfFile("repeated", 0, self.num_samples)]

    def batches(
        self,
        batch_size: int,
        *,
        position: Position = Position(),  # noqa: B008 - immutable
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        return (self.prepared[number % 4] for number in range(_STEPS))


@dataclass(frozen=True, kw_only=True)
class StepData(DataSource):
    """The step benchmark's data as a source."""

    shape: Shape

    def load(self) -> Dataset:
        features = tuple(
            Feature(name=name, num_embeddings=self.shape.num_rows, average_length=self.shape.bag)
            for name in keyed(self.shape)
        )
        return Dataset(
            name="dlrm_step", features=features, num_dense=self.shape.dense_in, train=Repeated(self.shape)
        )


def run(effort: Effort, *, tiny: bool = False) -> Result:
    """Verify that both loops compute the same, time them, and compare the trainer with its bar."""
    shape = TINY if tiny else Shape()
    with RankPool(2, timeout_seconds=900) as pool:
        for ours, theirs in pool.run(losses_after_a_round):
            if abs(ours - theirs) > 1e-5:
                raise AssertionError(f"the trainer comes to a loss of {ours}, the bare loop to {theirs}")
        found = pool.run(measure, shape, effort.rounds)
    trainer, bare = (
        [max(both) for both in zip(*(getattr(rank, loop) for rank in found), strict=True)]
        for loop in ("trainer", "bare")
    )
    ratio = statistics.median(b / t for t, b in zip(trainer, bare, strict=True))
    rows = [
        [name, f"{1e3 * statistics.median(each):.1f}", f"{2 * shape.batch / statistics.median(each):,.0f}"]
        for name, each in (("bare loop", bare), ("trainer", trainer))
    ]
    print(table(["loop", "step ms", "samples/s"], rows))
    figures = {"trainer_ms": [1e3 * t for t in trainer], "bare_ms": [1e3 * b for b in bare], "ratio": ratio}
    return Result(
        figures, [Bar(name="the trainer's throughput against a bare loop", figure=ratio, asked=0.95)]
    )


def losses_after_a_round() -> tuple[float, float]:
    """Train one small model with the trainer and the bare loop on every rank; return both results."""
    (ours, batches), (theirs, _) = _trainer(TINY), _trainer(TINY)
    ours.run()
    _bare_round(theirs, batches)
    return _loss(ours, batches[0]), _loss(theirs, batches[0])


def measure(shape: Shape, rounds: int) -> Measured:
    """Time the trainer and the bare loop in turns on every rank, after one untimed round of each."""
    trainer, batches = _trainer(shape)
    seconds: dict[str, list[float]] = {"trainer": [], "bare": []}
    for number in range(rounds + 1):
        for name in ("trainer", "bare"):
            dist.barrier()
            start = time.perf_counter()
            if name == "trainer":
                trainer.progress.load_state_dict(Progress().state_dict())
                trainer.run()
            else:
                _bare_round(trainer, batches)
            if number:
                seconds[name].append((time.perf_counter() - start) / _STEPS)
    return Measured(seconds["trainer"], seconds["bare"])


def _trainer(shape: Shape) -> tuple[Trainer, list[Batch]]:
    source = StepData(shape=shape)
    recipe = Recipe(
        name="dlrm_step",
        data=source,
        model=DLRMConfig(embedding_dim=shape.dim, bottom=shape.bottom[:-1], top=shape.top[:-1]),
        tables=RowWiseAdagrad(lr=LR),
        dense=DenseOptimizer(kind="adagrad", lr=LR),
        training=Training(batch_size=shape.batch * dist.get_world_size(), log_every=10),
    )
    dataset = source.load()
    assert isinstance(dataset.train, Repeated)
    return Trainer(recipe, dataset, join("cpu")), dataset.train.prepared


def _bare_round(trainer: Trainer, batches: list[Batch]) -> None:
    """Train as a user would without a trainer."""
    model, dense = trainer.built.model, trainer.built.dense
    for step in range(_STEPS):
        batch = batches[step % len(batches)]
        dense.zero_grad()
        logits = model(batch.dense, batch.sparse).squeeze(1)
        nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        dense.step()


def _loss(trainer: Trainer, batch: Batch) -> float:
    with torch.no_grad():
        logits = trainer.built.model(batch.dense, batch.sparse).squeeze(1)
        return float(nn.functional.binary_cross_entropy_with_logits(logits, batch.labels))


def _batch(shape: Shape, number: int) -> Batch:
    inputs = make_inputs(shape, number)
    sparse = KeyedJaggedTensor(keyed(shape), inputs.ids, offsets=inputs.offsets)
    return Batch(inputs.dense, sparse, inputs.labels)
