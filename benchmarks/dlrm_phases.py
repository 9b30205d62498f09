"""Planner's prediction of the step in `benchmarks.dlrm_step`, beside the measured phases."""

import gc

import torch.distributed as dist

from benchmarks.dlrm_contenders import Shape, build, make_inputs, plan_tables
from meshrec.distributed import record_phases
from meshrec.planner.calibration.calibrate import calibrate
from meshrec.planner.hardware import HardwareProfile
from meshrec.planner.measured import Comparison, PhaseTime, compare
from meshrec.planner.plan_file import PlannedShardingPlan, PlannerInputs
from meshrec.planner.types import OptimizerKind, Table, Topology

_STEPS = 10


def measure_profile() -> HardwareProfile:
    """Calibrate this machine on every rank, as ``meshrec calibrate`` does."""
    return calibrate(dist.group.WORLD)


def measure_phases(kind: str, shape: Shape) -> list[PhaseTime]:
    """Measure the phases of some steps on every rank, waiting for each collective where it starts."""
    gc.collect()  # the tables of the model before lie in reference cycles
    step = build("meshrec", kind, shape).step
    batches = [make_inputs(shape, number) for number in range(4)]
    for batch in batches:
        step(batch)
    times = []
    for number in range(_STEPS):
        dist.barrier()
        with record_phases(overlap=False) as seconds:
            step(batches[number % 4])
        times += [PhaseTime(phase, dist.get_rank(), taken, number) for phase, taken in seconds.items()]
    return times


def compared(kind: str, shape: Shape, profile: HardwareProfile, times: list[PhaseTime]) -> list[Comparison]:
    """Return the predicted and measured milliseconds of each phase and of their sum."""
    plan = planned(kind, shape, profile, 2, local_ranks=1 if kind == "grid_shard" else 2)
    return compare(plan, times)


def planned(
    kind: str, shape: Shape, profile: HardwareProfile, num_ranks: int, *, local_ranks: int
) -> PlannedShardingPlan:
    """Return the plan of a kind on some ranks of a machine, which predicts its step."""
    tables = tuple(
        Table(
            name=name,
            num_embeddings=shape.num_rows,
            embedding_dim=shape.dim,
            pooling_factors=(float(shape.bag),),
            optimizer=OptimizerKind.ROW_WISE_ADAGRAD,
        )
        for name in (f"t{number}" for number in range(shape.num_tables))
    )
    topology = Topology(
        world_size=num_ranks, compute_device="cpu", local_world_size=local_ranks, hardware=profile
    )
    inputs = PlannerInputs(tables=tables, topology=topology, batch_size=shape.batch)
    return PlannedShardingPlan({"": plan_tables(kind, shape, num_ranks)}, inputs=inputs)
