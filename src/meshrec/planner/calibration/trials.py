"""Calibration trials: training steps of small sharded modules, whose phases are timed.

Like real training, they run routing, exchanges, lookups and fused updates on all ranks at once.
"""

import gc
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrec.comms.mesh import ShardingEnv
from meshrec.comms.phase_clock import record_phases
from meshrec.distributed.sharders import EmbeddingBagCollectionSharder
from meshrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from meshrec.optim import RowWiseAdagrad
from meshrec.plan.builders import WorldShape, column_wise, data_parallel, row_wise, table_wise
from meshrec.plan.sharding_plan import EmbeddingModuleShardingPlan, TableSize
from meshrec.planner.estimators import PHASES
from meshrec.planner.types import OptimizerKind, Table
from meshrec.sparse import KeyedJaggedTensor

_logger = logging.getLogger("meshrec")
_KINDS = ("table_wise", "column_wise", "row_wise", "data_parallel")
_ROWS_PER_ID = 12  # of the global batch: tables exceed the caches, and a batch touches a twelfth
# Maximum rows per table: bounds the memory of trials with large batches.
_MOST_ROWS = 200_000
# Uncounted steps at the start of a trial.
_WARM_UP = 3
# Distinct batches per trial, used in turn.
_NUM_BATCHES = 4
# Bytes of a stand-in for the dense model, see _take_steps.
_DENSE_BYTES = 1 << 25


class Trial(NamedTuple):
    """A small module to time: equal tables, all sharded the same way.

    Attributes:
        kind: sharding type, from `_KINDS`.
        num_tables: number of tables.
        num_rows: rows per table.
        dim: columns per table.
        batch_size: bags per rank and table.
        bag: IDs per bag.
    """

    kind: str
    num_tables: int
    num_rows: int
    dim: int
    batch_size: int
    bag: int

    def tables(self) -> list[Table]:
        """Return the trial's tables in the cost model's form."""
        return [
            Table(
                name=name,
                num_embeddings=self.num_rows,
                embedding_dim=self.dim,
                pooling_factors=(float(self.bag),),
                # The optimizer with which `_take_steps` trains.
                optimizer=OptimizerKind.ROW_WISE_ADAGRAD,
            )
            for name in self._names()
        ]

    def plan(self, num_ranks: int) -> EmbeddingModuleShardingPlan:
        """Return the sharding plan of the module, which gives every rank the same amount of work."""
        ranks, size = WorldShape(num_ranks, num_ranks), TableSize(self.num_rows, self.dim)
        builders = {
            "table_wise": lambda number: table_wise(rank=number % num_ranks),
            # Two parts on adjacent ranks, so that every rank has two halves of tables.
            "column_wise": lambda number: column_wise(ranks=[number % num_ranks, (number + 1) % num_ranks]),
            "row_wise": lambda number: row_wise(),
            "data_parallel": lambda number: data_parallel(),
        }
        return EmbeddingModuleShardingPlan(
            {name: builders[self.kind](i)(name, size, ranks) for i, name in enumerate(self._names())}
        )

    def _names(self) -> list[str]:
        return [f"t{number}" for number in range(self.num_tables)]


def make_trials(num_ranks: int, batch_size: int) -> list[Trial]:
    """Return the trials to run: tables with several widths and bag sizes, in every sharding type.

    The last trials have few samples, so that fixed costs dominate them.

    Args:
        num_ranks: rank count.
        batch_size: bags per rank and table in the largest trial.
    """
    trials = []
    half, few = max(1, batch_size // 2), max(1, batch_size // 32)
    # Column shards are at least as wide as the planner's.
    for num_tables, dim, bag, batch in (
        (16, 64, 6, half),
        (32, 64, 2, batch_size),
        (16, 128, 3, half),
        (16, 64, 1, few),
    ):
        # Rounded up, so that every rank holds equally many tables.
        for_all = -(-num_tables // num_ranks) * num_ranks
        rows = min(_ROWS_PER_ID * bag * batch * num_ranks, _MOST_ROWS)
        for kind in _KINDS if num_ranks > 1 else _KINDS[:1]:
            # A rank holds as many bytes as under the other kinds: whole tables would take longer to travel
            # to all ranks than the steps take.
            held = -(-rows // num_ranks) if kind == "data_parallel" else rows
            trials.append(Trial(kind, for_all, held, dim, batch, bag))
    return trials


def measure(
    trials: Sequence[Trial],
    env: ShardingEnv,
    device: torch.device,
    *,
    steps: int,
    rounds: int,
    max_seconds: float = math.inf,
) -> list[Mapping[str, float]]:
    """Run all trials, and measure the seconds of their phases. Collective.

    A phase is averaged over ranks, because the phases of a rank include waiting and add up to the step. The
    maxima over ranks would add up to more than any step. Every round runs all trials, so that disturbances
    affect all trials alike.

    Args:
        trials: trials, which give all ranks equal work.
        env: process groups.
        device: device to measure.
        steps: timed steps per trial and round.
        rounds: maximum round count.
        max_seconds: time limit; a round which would probably end later does not start.

    Returns:
        For every trial, seconds by phase name. The seconds are the median over all steps of the mean over
        ranks. Phases that took no time are left out.
    """
    times_by_trial: list[list[list[float]]] = [[] for _ in trials]
    dense = torch.ones(_DENSE_BYTES // 4, device=device)
    began = time.monotonic()
    # The collections between trials should not walk the objects that already exist.
    gc.freeze()
    for number in range(1, rounds + 1):
        for trial, times in zip(trials, times_by_trial, strict=True):
            for seconds in _take_steps(trial, env, dense, steps):
                times.append([seconds.get(phase, 0.0) for phase in PHASES])
            gc.collect()  # free tables in reference cycles
        passed = _largest(time.monotonic() - began, env, device)
        if number < rounds and passed * (number + 1) / number > max_seconds:
            _logger.info("calibration: %d of %d rounds took %.0f s", number, rounds, passed)
            break
    gc.unfreeze()
    sums = torch.tensor(times_by_trial, dtype=torch.float64, device=device)
    if env.world.group is not None:
        dist.all_reduce(sums, group=env.world.group)
    medians = (sums / env.world.size).quantile(0.5, dim=1).tolist()
    return [
        {phase: seconds for phase, seconds in zip(PHASES, row, strict=True) if seconds > 0} for row in medians
    ]


def _largest(seconds: float, env: ShardingEnv, device: torch.device) -> float:
    """Return the maximum over all ranks, so that all ranks stop after the same round. Collective."""
    value = torch.tensor(seconds, dtype=torch.float64, device=device)
    if env.world.group is not None:
        dist.all_reduce(value, dist.ReduceOp.MAX, group=env.world.group)
    return float(value)


def _take_steps(trial: Trial, env: ShardingEnv, dense: Tensor, steps: int) -> list[dict[str, float]]:
    """Run training steps of a trial on new tables. Collective.

    Args:
        steps: number of timed steps, after a few steps to warm up.

    Returns:
        For every timed step, seconds by phase name on this rank.
    """
    device = dense.device
    tables = [
        EmbeddingBagConfig(
            name=name,
            embedding_dim=trial.dim,
            num_embeddings=trial.num_rows,
            feature_names=[name],
            init_fn=nn.init.zeros_,
        )
        for name in (table.name for table in trial.tables())
    ]
    # On meta, so that only the shards are allocated.
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    sharder = EmbeddingBagCollectionSharder(RowWiseAdagrad(lr=1e-3))
    module = sharder.shard(collection, trial.plan(env.shard.size), env, device)
    # Each rank has other IDs, as in training.
    generator = torch.Generator().manual_seed(env.world.rank)
    batches = [_batch(trial, generator, device) for _ in range(_NUM_BATCHES)]
    step_seconds = []
    for number in range(_WARM_UP + steps):
        if env.world.group is not None:
            dist.barrier(env.world.group)
        with record_phases(device=device, overlap=False) as seconds:
            embeddings = module(batches[number % _NUM_BATCHES]).values()
            dense.mul_(1.0)  # evicts tables from the CPU caches, as a dense model does
            embeddings.backward(embeddings.detach() * 1e-3)
        step_seconds.append(seconds)
    return step_seconds[_WARM_UP:]


def _batch(trial: Trial, generator: torch.Generator, device: torch.device) -> KeyedJaggedTensor:
    """Return a batch of uniformly random IDs for all tables of a trial."""
    num_bags = trial.num_tables * trial.batch_size
    ids = torch.randint(0, trial.num_rows, (num_bags * trial.bag,), generator=generator)
    offsets = torch.arange(num_bags + 1) * trial.bag
    return KeyedJaggedTensor(
        [table.name for table in trial.tables()], ids.to(device), offsets=offsets.to(device)
    )
