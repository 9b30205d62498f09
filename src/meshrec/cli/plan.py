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
from meshrec.planner import PlannedShardingPlan, Topology, load_plan, plan_tables, save_plan
from meshrec.planner.measured import compare, read_phases
from meshrec.planner.report import diff, make_report, what_if
from meshrec.planner.report_html import write_html
from meshrec.planner.report_text import render, render_diff, render_what_if
from meshrec.planner.search import Effort
from meshrec.planner.tasks import load_task


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Plans embedding tables for a cluster and proves how good the plan is.

    SOURCE is a task file (tables as JSON) or a plan that this command saved.
    """

    source: Annotated[Path | None, tyro.conf.Positional] = None
    """A task file, or a saved plan to explain."""
    ranks: int = 8
    """Number of ranks."""
    ranks_per_node: int | None = None
    """Ranks that share a node."""
    hardware: str = "h100"
    """A built-in profile (cpu, a100, h100, h200), or a file of `meshrec calibrate`."""
    batch_size: int | None = None
    """Samples per rank (default: the task's global batch over the ranks)."""
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
    """A training run's folder (or its phases.jsonl): prediction next to measurement."""


def run(options: PlanOptions) -> None:
    """Does what the options say. ValueError for what cannot be."""
    if options.diff is not None:
        old, new = options.diff
        render_diff(diff(ShardingPlan.load(old), load_plan(new)))
        return
    if options.source is None:
        raise ValueError("name a task file or a saved plan, or use --diff OLD NEW.")
    plan = _plan(options.source, options)
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
        raise ValueError(f"{source} is no file; give a task file or a saved plan.")
    if "planner" in json.loads(source.read_text()):
        return load_plan(source)
    task = load_task(source)
    memory = None if options.memory_gib is None else int(options.memory_gib * 1024**3)
    topology = Topology(
        world_size=options.ranks,
        compute_device="cpu" if options.hardware == "cpu" else "cuda",
        local_world_size=options.ranks_per_node,
        hardware=options.hardware,
        hbm_cap=memory,
        ddr_cap=memory,
    )
    return plan_tables(
        task.tables,
        replace(topology, local_world_size=topology.local_size),
        batch_size=options.batch_size or task.batch_size(options.ranks),
        effort=Effort(options.time_limit, options.max_work, options.gap),
    )


def _ranks(text: str) -> list[int]:
    name, _, values = text.partition("=")
    try:
        if name != "ranks":
            raise ValueError(name)
        return [int(value) for value in values.split(",")]
    except ValueError as error:
        raise ValueError(f"--what-if {text!r}: write ranks=16,32,64.") from error


def _print_comparison(plan: PlannedShardingPlan, path: Path) -> None:
    grid = Grid("phase", "predicted [ms]", "measured [ms]", "error")
    for row in compare(plan, read_phases(path)):
        grid.add_row(
            row.phase, f"{row.predicted * 1e3:.3f}", f"{row.measured * 1e3:.3f}", f"{row.error:+.0%}"
        )
    Console().print(grid)
