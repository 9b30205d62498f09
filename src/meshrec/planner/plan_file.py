"""Plans together with the inputs from which they were planned, plan files, and task files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from meshrec.comms.wire import FULL_PRECISION, WireFormats
from meshrec.plan.sharding_plan import ShardingPlan, ShardingType
from meshrec.plan.text import read_json
from meshrec.planner.estimators import PHASES
from meshrec.planner.evaluate import StepEstimate, evaluate
from meshrec.planner.hardware import HardwareProfile
from meshrec.planner.types import OptimizerKind, ParameterConstraints, Table, Topology


@dataclass(frozen=True, kw_only=True)
class PlannerInputs:
    """Everything from which the planner computed a plan.

    Attributes:
        tables: all tables in the model.
        topology: machine to plan for.
        batch_size: samples per rank.
        constraints: user constraints by table name.
    """

    tables: tuple[Table, ...]
    topology: Topology
    batch_size: int
    constraints: Mapping[str, ParameterConstraints] = field(default_factory=dict, hash=False)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON types. The hardware profile is written with all values, not by name."""
        topology = {f.name: getattr(self.topology, f.name) for f in fields(Topology)}
        # The values instead of a name: profiles may change between releases.
        topology["hardware"] = self.topology.profile.to_json()
        topology["replicate"] = list(self.topology.replicate)
        return {
            "batch_size": self.batch_size,
            "topology": topology,
            "tables": [
                asdict(table) | {"optimizer": table.optimizer.value, "wire": str(table.wire)}
                for table in self.tables
            ],
            "constraints": {name: _constraints_to_json(value) for name, value in self.constraints.items()},
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "PlannerInputs":
        """Create inputs from `to_json` output, including output of older releases."""
        topology = dict(values["topology"])
        # In older plans, the device is only in the topology.
        device = {"device": topology["compute_device"]}
        topology["hardware"] = HardwareProfile.from_json(device | topology["hardware"])
        topology["replicate"] = tuple(topology["replicate"])
        tables = tuple(
            Table(
                **{
                    **table,
                    "optimizer": OptimizerKind(table["optimizer"]),
                    "pooling_factors": tuple(table["pooling_factors"]),
                    # Older plans have no wire formats: all exchanges were fp32.
                    "wire": WireFormats.parse(table.get("wire", str(FULL_PRECISION))),
                    "num_poolings": None if table["num_poolings"] is None else tuple(table["num_poolings"]),
                }
            )
            for table in values["tables"]
        )
        constraints = {name: ParameterConstraints(**value) for name, value in values["constraints"].items()}
        return cls(
            tables=tables,
            topology=Topology(**topology),
            batch_size=values["batch_size"],
            constraints=constraints,
        )


@dataclass(frozen=True)
class PlannedShardingPlan(ShardingPlan):
    """Sharding plan from the planner, with the predicted step time and a proven lower bound.

    Attributes:
        seconds: predicted step time in seconds, without the dense part of the model.
        lower_bound: step time in seconds which no plan under the user's constraints can beat.
        replicas: ``replicate`` axis size.
        inputs: inputs from which the plan was computed; None if they are not known.
    """

    seconds: float = 0.0
    lower_bound: float = 0.0
    replicas: int = 1
    inputs: PlannerInputs | None = None

    @property
    def gap(self) -> float:
        """Upper bound on the time a better plan could save, as a fraction of this plan's step time."""
        return max(0.0, 1 - self.lower_bound / self.seconds) if self.seconds else 0.0

    def __str__(self) -> str:
        """Format the placement, the predicted step time and the optimality gap as text.

        Row-wise tables that occupy only some of the ranks are listed, with advice to use all ranks.
        """
        if self.inputs is None:
            return super().__str__()
        ranks = self.inputs.topology.world_size // self.replicas
        lines = [
            super().__str__(),
            f"predicted step without the dense part: {self.seconds * 1e3:.3f} ms. No plan of the allowed "
            f"kinds takes less than {self.lower_bound * 1e3:.3f} ms (gap {self.gap:.2%}).",
        ]
        for _, table, placed in self.tables():
            used = len(set(placed.ranks or ()))
            if placed.sharding_type is ShardingType.ROW_WISE and used < ranks:
                lines.append(
                    f"table {table!r}: its rows are on {used} of {ranks} ranks, which the planner predicts "
                    "to be the fastest. To use all of them, give it ParameterConstraints(all_ranks=True)."
                )
        return "\n\n".join(lines)

    def estimate(self) -> StepEstimate:
        """Predict the plan's step time and memory per rank, with the inputs from which it was planned.

        Raises:
            ValueError: the plan has no inputs.
        """
        inputs = self.required_inputs()
        return evaluate(
            self, inputs.tables, inputs.topology, batch_size=inputs.batch_size, replicas=self.replicas
        )

    def required_inputs(self) -> PlannerInputs:
        """Return the inputs from which the plan was computed.

        Raises:
            ValueError: the plan has none.
        """
        if self.inputs is None:
            raise ValueError("this plan does not contain its inputs; plan again, or use evaluate().")
        return self.inputs


def save_plan(plan: PlannedShardingPlan, path: str | Path) -> None:
    """Write a plan with its inputs as JSON, replacing an existing file.

    `load_plan` reads the file. `ShardingPlan.load` reads it as well, without the inputs.

    Raises:
        ValueError: the plan has no inputs.
    """
    data = json.loads(plan.to_json())
    inputs = plan.required_inputs()
    estimate = plan.estimate()
    # By this entry, `meshrec plan` distinguishes a saved plan from a task file.
    data["planner"] = {
        "seconds": plan.seconds,
        "lower_bound": plan.lower_bound,
        "gap": plan.gap,
        "replicas": plan.replicas,
        "phases": dict(zip(PHASES, map(float, estimate.phase_seconds_F), strict=True)),
        "bytes_per_rank": [round(value) for value in estimate.bytes_R],
        "inputs": inputs.to_json(),
    }
    Path(path).write_text(json.dumps(data, indent=1) + "\n")


def load_plan(path: str | Path) -> PlannedShardingPlan:
    """Read a plan with its inputs from a `save_plan` file.

    Raises:
        ValueError: the file is damaged, or has a plan without inputs.
    """
    plan = ShardingPlan.load(path)
    planner = read_json(path, "a saved plan").get("planner")
    if planner is None:
        raise ValueError(f"{path} has a plan without its inputs; read it with ShardingPlan.load().")
    try:
        return PlannedShardingPlan(
            plan.plan,
            seconds=planner["seconds"],
            lower_bound=planner["lower_bound"],
            replicas=planner["replicas"],
            inputs=PlannerInputs.from_json(planner["inputs"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path} has a plan with incomplete inputs, or from another release: {error}. Plan again."
        ) from error


def _constraints_to_json(constraints: ParameterConstraints) -> dict[str, Any]:
    """Convert constraints to JSON types."""
    values = asdict(constraints)
    if constraints.sharding_types is not None:
        values["sharding_types"] = [ShardingType(kind).value for kind in constraints.sharding_types]
    return {
        name: list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        for name, value in values.items()
    }


# Bytes per weight for every value of ``dtype`` in a task file.
_WEIGHT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class PlannerTask:
    """Planning task without a model, for benchmarks and ``meshrec plan``: tables and the batch size.

    Attributes:
        name: task name.
        tables: tables to plan.
        global_batch_size: samples per step over all ranks.
        world_sizes: numbers of ranks for which the task is meant to be planned.
    """

    name: str
    tables: tuple[Table, ...]
    global_batch_size: int
    world_sizes: tuple[int, ...] = ()

    def batch_size(self, world_size: int) -> int:
        """Return the sample count per rank, at least 1."""
        return max(1, self.global_batch_size // world_size)


def load_task(path: str | Path) -> PlannerTask:
    """Read a planning task from a JSON file.

    The object has the keys ``task`` (the name), ``global_batch_size`` and ``tables``. A table has ``name``,
    ``num_embeddings``, ``embedding_dim`` and ``pooling_factors``. Optional keys are ``world_sizes``,
    ``dtype`` (``"fp32"``), ``optimizer`` (row-wise Adagrad) and ``wire`` (such as ``"fp16/bf16"``).

    Raises:
        ValueError: a key is missing, or a value is unknown. The message names it.
    """
    data = read_json(path, "a task file")
    try:
        weight_bytes = _WEIGHT_BYTES[data.get("dtype", "fp32")]
        wire = WireFormats.parse(data.get("wire", str(FULL_PRECISION)))
        optimizer = OptimizerKind(data.get("optimizer", OptimizerKind.ROW_WISE_ADAGRAD.value))
        tables = tuple(
            Table(
                name=table["name"],
                num_embeddings=table["num_embeddings"],
                embedding_dim=table["embedding_dim"],
                pooling_factors=tuple(table["pooling_factors"]),
                weight_bytes=weight_bytes,
                optimizer=optimizer,
                wire=wire,
            )
            for table in data["tables"]
        )
        return PlannerTask(
            name=data["task"],
            tables=tables,
            global_batch_size=data["global_batch_size"],
            world_sizes=tuple(data.get("world_sizes", ())),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a task file: missing or unknown: {error}. It needs task, global_batch_size, "
            "dtype (fp32, fp16, bf16) and tables with name, num_embeddings, embedding_dim, pooling_factors."
        ) from error
