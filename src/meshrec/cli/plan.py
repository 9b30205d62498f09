"""``meshrec plan``: plans a table set, explains the plan, compares it."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table as Grid

from meshrec.distributed.sharding_plan import ShardingPlan
from meshrec.planner import PlannedShardingPlan, Topology, get_profile, load_plan, plan_tables, save_plan
from meshrec.planner.measured import compare, read_phases
from meshrec.planner.report import diff, make_report, what_if
from meshrec.planner.report_html import write_html
from meshrec.planner.report_text import render, render_diff, render_what_if
from meshrec.planner.search import Effort
from meshrec.planner.tasks import load_task
from meshrec.train.planning import make_plan, topology_of
from meshrec.train.recipe import Recipe
from meshrec.train.recipes import RECIPES, resolve
from meshrec.train.run_folder import PLAN


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Plans embedding tables for a cluster and proves how good the plan is.

    SOURCE is a recipe (as for `meshrec train`), a task file (tables as JSON), or a plan that this command or
    a training run saved.
    """

    source: Annotated[Path | None, tyro.conf.Positional] = None
    """A recipe, a task file, or a saved plan to explain."""
    ranks: int = 8
    """Number of ranks."""
    ranks_per_node: int | None = None
    """Ranks that share a node."""
    hardware: str | None = None
    """A built-in profile (cpu, a100, h100, h200), or a file of `meshrec calibrate` (default: the recipe's;
    h100 for task files)."""
    batch_size: int | None = None
    """Samples per rank (default: the global batch of the task or recipe over the ranks)."""
    memory_gib: float | None = None
    """Memory per rank (default: the profile's)."""
    time_limit: float = 30.0
    """Seconds after which the best plan so far counts."""
    max_work: float = 1e9
    """Effort that does not depend on the machine: touched array elements."""
    gap: float = 0.005
    """Stop when the plan is proven to be this close to the best."""
    out: Path | None = None
    """Save the plan here."""
    json: bool = False
    """Print the report as JSON."""
    html: Path | None = None
    """Write the report as one HTML page."""
    what_if: str | None = None
    """Other numbers of ranks to compare: ranks=16,32,64."""
    diff: tuple[Path, Path] | None = None
    """Two saved plans: what moves from the old to the new one."""
    compare: Path | None = None
    """A training run's folder (or its phases.jsonl): prediction next to measurement. Without SOURCE: of the
    run's own plan."""


def run(options: PlanOptions) -> None:
    """Does what the options say. ValueError for what cannot be."""
    if options.diff is not None:
        old, new = options.diff
        render_diff(diff(ShardingPlan.load(old), load_plan(new)))
        return
    source = options.source
    if source is None and options.compare is not None and (options.compare / PLAN).is_file():
        source = options.compare / PLAN
    if source is None:
        raise ValueError("name a recipe, a task file or a saved plan, or use --diff OLD NEW.")
    plan = _plan(source, options)
    if options.out is not None:
        save_plan(plan, options.out)
    if options.compare is not None:
        _print_comparison(plan, options.compare)
        return
    if options.what_if is not None:
        effort = Effort(options.time_limit, options.max_work, options.gap)
        render_what_if(what_if(plan, _ranks(options.what_if), effort))
        return
    report = make_report(plan)
    if options.html is not None:
        write_html(report, options.html)
    if options.json:
        json.dump(report.to_json(), sys.stdout)
        sys.stdout.write("\n")
    else:
        render(report)


def _plan(source: Path, options: PlanOptions) -> PlannedShardingPlan:
    if not source.is_file():
        if str(source) in RECIPES or ":" in str(source):
            return _plan_of_recipe(resolve(str(source)), options)
        raise ValueError(
            f"{source} is no file and no recipe; give a task file, a saved plan, or one of "
            f"{', '.join(RECIPES)}."
        )
    if "planner" in json.loads(source.read_text()):
        return load_plan(source)
    task = load_task(source)
    memory = None if options.memory_gib is None else int(options.memory_gib * 1024**3)
    hardware = options.hardware or "h100"
    topology = Topology(
        world_size=options.ranks,
        compute_device=get_profile(hardware).device,
        local_world_size=options.ranks_per_node,
        hardware=hardware,
        hbm_cap=memory,
        ddr_cap=memory,
    )
    return plan_tables(
        task.tables,
        replace(topology, local_world_size=topology.local_size),
        batch_size=options.batch_size or task.batch_size(options.ranks),
        effort=Effort(options.time_limit, options.max_work, options.gap),
    )


def _plan_of_recipe(recipe: Recipe, options: PlanOptions) -> PlannedShardingPlan:
    placement, training = recipe.placement, recipe.training
    if options.batch_size is not None:
        training = replace(training, batch_size=options.batch_size * options.ranks)
    hardware = options.hardware or placement.hardware or "cpu"
    memory = placement.memory_gib if options.memory_gib is None else options.memory_gib
    recipe = replace(
        recipe, training=training, placement=replace(placement, hardware=hardware, memory_gib=memory)
    )
    recipe.check(options.ranks)
    dataset = recipe.data.load()
    topology = topology_of(
        recipe,
        world_size=options.ranks,
        local_size=options.ranks_per_node or options.ranks,
        device=get_profile(hardware).device,
    )
    return make_plan(recipe, recipe.model.build(dataset), dataset, topology)


def _ranks(text: str) -> list[int]:
    name, _, values = text.partition("=")
    try:
        if name != "ranks":
            raise ValueError(name)
        return [int(value) for value in values.split(",")]
    except ValueError as error:
        raise ValueError(f"--what-if {text!r}: write ranks=16,32,64.") from error


def _print_comparison(plan: PlannedShardingPlan, path: Path) -> None:
    grid = Grid("phase", "predicted, ms", "measured, ms", "error")
    for row in compare(plan, read_phases(path)):
        grid.add_row(
            row.phase, f"{row.predicted * 1e3:.3f}", f"{row.measured * 1e3:.3f}", f"{row.error:+.0%}"
        )
    Console().print(grid)
