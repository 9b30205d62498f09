"""Planner: sharding plans in seconds, with a proven bound on how much faster any plan could be."""

from typing import TYPE_CHECKING

from meshrec.lazy import import_on_use
from meshrec.planner.evaluate import StepEstimate, evaluate  # a function with the name of its module

if TYPE_CHECKING:
    from meshrec.planner.disk import IdSample, PlacedTable, StoragePlan, place_rows
    from meshrec.planner.hardware import BUILTIN_PROFILES, Disk, HardwareProfile, Link, get_profile
    from meshrec.planner.module_tables import estimate_from_batches, tables_of_model
    from meshrec.planner.plan_file import PlannedShardingPlan, PlannerInputs, load_plan, save_plan
    from meshrec.planner.planners import EmbeddingShardingPlanner, plan_tables
    from meshrec.planner.types import OptimizerKind, ParameterConstraints, Table, Topology

__all__ = [
    "BUILTIN_PROFILES",
    "Disk",
    "EmbeddingShardingPlanner",
    "HardwareProfile",
    "IdSample",
    "Link",
    "OptimizerKind",
    "ParameterConstraints",
    "PlacedTable",
    "PlannedShardingPlan",
    "PlannerInputs",
    "StepEstimate",
    "StoragePlan",
    "Table",
    "Topology",
    "estimate_from_batches",
    "evaluate",
    "get_profile",
    "load_plan",
    "place_rows",
    "plan_tables",
    "save_plan",
    "tables_of_model",
]

import_on_use(__name__)
