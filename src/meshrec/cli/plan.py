"""``meshrec plan``: plan how tables are sharded, and explain and compare plans."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table as Grid

from meshrec.cli.arguments import Words, check_output, parse
from meshrec.cli.plan_data import print_data_plan
from meshrec.comms.wire import AcrossNodes, TableWires
from meshrec.plan.sharding_plan import ShardingPlan
from meshrec.plan.text import read_json
from meshrec.planner import PlannedShardingPlan, Topology, get_profile, load_plan, plan_tables, save_plan
from meshrec.planner.measured import PHASES_FILE, compare, compare_pipelined, read_phases
from meshrec.planner.optimize import DEFAULT_EFFORT
from meshrec.planner.plan_file import load_task
from meshrec.planner.plan_report import diff, make_report, what_if, write_html
from meshrec.planner.plan_text import render, render_diff, render_what_if
from meshrec.planner.search import Effort
from meshrec.planner.wire_choice import AUTO, WireBound, choose_wires
from meshrec.stages.layouts import layouts
from meshrec.train.planning import make_plan, topology_of
from meshrec.train.recipe import YAML_SUFFIXES, Recipe
from meshrec.train.recipe_files import resolve
from meshrec.train.recipes import RECIPES
from meshrec.train.run_folder import CONFIG, PLAN, RunFolder, run_or_path

# Default of --ranks.
_RANKS = 8
_NEW_PLAN_OPTIONS = (
    *("ranks", "ranks_per_node", "hardware", "batch_size", "memory_gib", "wire"),
    *("across_nodes", "packed_ids"),
)
"""Options for new plans only. A saved plan already contains their values."""
_DATA_OPTIONS = ("data", "source", "ranks", "memory_gib", "json")
"""Options that may be combined with --data."""
# Default search limit for task files; see `PlanOptions.max_work`.
_MAX_WORK = 1e9


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Plan the placement of embedding tables on a cluster, with a proven bound on the gap to the best plan.

    SOURCE is a recipe (as for `meshrec train`), a task file (tables as JSON), or a plan saved by this command
    or a training run.
    """

    source: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[SOURCE]")] = None
    """Recipe or task file to plan; or saved plan, run name or run folder, to explain the plan."""
    ranks: int | None = None
    """Number of ranks; none: 8, or 1 with --data."""
    ranks_per_node: int | None = None
    """Ranks per node; none: 8 on GPUs; all ranks on CPUs and for recipes."""
    hardware: str | None = None
    """Hardware profile: cpu, a100, h100, h200, or a file from `meshrec calibrate`; none: the recipe's
    profile, or h100.
    """
    batch_size: int | None = None
    """Samples per rank; none: the global batch of task or recipe, divided by the number of ranks."""
    memory_gib: float | None = None
    """Memory per rank in GiB; none: from the hardware profile."""
    wire: str | None = None
    """Network format of embeddings and gradients: fp32, fp16, bf16, int8, int4, two formats such as
    int8/bf16 (embeddings first), or auto; none: as in the recipe or task file, or fp32.
    """
    wire_auc_loss: float | None = None
    """For --wire auto: maximum AUC loss of the formats, by MeshRec's measurements; none: 0.0005, or no limit
    with --wire-error.
    """
    wire_error: float | None = None
    """For --wire auto: maximum error of a value, relative to the largest value in the row."""
    across_nodes: AcrossNodes | None = None
    """Data exchanged between nodes, for the cost model: bag sums, or distinct rows; none: sums."""
    packed_ids: bool = False
    """Assume bit-packed IDs between nodes. Set it if the log of a run with rows across nodes reports them."""
    time_limit: float = 30.0
    """Seconds after which the search stops and returns the best plan so far."""
    max_work: float | None = None
    """Search limit in array elements touched: unlike seconds, it gives the same plan on any machine. None:
    1e9; for a recipe, as in training.
    """
    gap: float = 0.005
    """Stop when the plan is proven to be within this fraction of the best plan."""
    out: Path | None = None
    """File for the plan."""
    json: bool = False
    """Print the report as JSON."""
    html: Path | None = None
    """File for the report as an HTML page."""
    force: bool = False
    """Replace existing files."""
    what_if: str | None = None
    """Compare with other rank counts, such as ranks=16,32,64."""
    diff: tuple[Path, Path] | None = None
    """Two saved plans or runs: show which shards move from the old to the new plan."""
    layouts: bool = False
    """For a recipe: measure the dense part on this machine, and compare replication, sharding and staging."""
    data: Words = ()
    """Predict memory, disk and time for data of a size: rows=1e9 users=2e7 items=2e6 for a log, or rows=1e9
    values=1e7 text_values=1e6 for a table, also table_rows, width, samples, epochs, evaluated_users and
    samples_per_second (of one rank). SOURCE, a recipe or run, gives all other counts; recipe: all of them.
    """
    compare: Path | None = None
    """Run name, run folder or phases.jsonl: compare measured times with the times predicted by SOURCE, or by
    the run's plan.
    """


def main(arguments: Sequence[str]) -> int:
    run(parse(PlanOptions, arguments, program="meshrec plan"))
    return 0


def run(options: PlanOptions) -> None:
    """Plan, explain or compare, depending on the options, and print or write the result.

    Raises:
        ValueError: an option or a file cannot be used.
    """
    _check_combinations(options)
    if options.diff is not None:
        old, new = map(_plan_of_run, options.diff)
        # The new plan needs its inputs, for the sizes of tables. The old plan may be any plan.
        render_diff(diff(ShardingPlan.load(old), load_plan(new)))
        return
    _check_values(options)
    if options.data:
        print_data_plan(
            options.data,
            options.source,
            ranks=options.ranks or 1,
            memory_gib=options.memory_gib,
            as_text=not options.json,
        )
        return
    if options.layouts:
        _print_layouts(_find_source(options), options)
        return
    plan = _make_plan(_find_source(options), options)
    # Before the comparisons, which end the command.
    if options.out is not None:
        save_plan(plan, options.out)
    if options.compare is not None:
        _print_comparison(plan, run_or_path(options.compare))
        return
    if options.what_if is not None:
        render_what_if(what_if(plan, _parse_what_if(options.what_if), _effort(options, _MAX_WORK)))
        return
    report = make_report(plan)
    if options.html is not None:
        write_html(report, options.html)
    if options.json:
        json.dump(report.to_json(), sys.stdout)
        sys.stdout.write("\n")
        return
    render(report)
    for kind, path in (("plan", options.out), ("page", options.html)):
        if path is not None:
            print(f"the {kind}: {path}")


def _check_combinations(options: PlanOptions) -> None:
    """Raise ValueError if options are combined although the command would ignore some of them."""
    given = [option.name for option in fields(options) if getattr(options, option.name) != option.default]
    if "data" in given:
        if ignored := [name for name in given if name not in _DATA_OPTIONS]:
            raise ValueError(
                f"--data cannot be combined with --{ignored[0].replace('_', '-')}: it plans no tables. Leave "
                "one of them out."
            )
        return
    tasks: list[str] = [name for name in ("diff", "layouts", "compare", "what_if") if name in given]
    if not tasks:
        return
    # --diff compares two files and ignores every other option. The other tasks exclude one another, and print
    # neither a page nor JSON.
    ignored = [name for name in given if name != tasks[0]] if tasks[0] == "diff" else tasks[1:]
    ignored += [name for name in ("html", "json") if name in given]
    if ignored:
        first, other = (name.replace("_", "-") for name in (tasks[0], ignored[0]))
        other = "SOURCE" if other == "source" else f"--{other}"
        raise ValueError(
            f"--{first} cannot be combined with {other}: it prints one table. Leave {other} out."
        )


def _check_values(options: PlanOptions) -> None:
    """Raise ValueError if an option value is out of range, or an output file cannot be written."""
    for name in ("ranks", "ranks_per_node", "batch_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least 1.")
    if options.memory_gib is not None and not options.memory_gib > 0:
        raise ValueError(f"--memory-gib is {options.memory_gib:g}; it must be positive.")
    for name in ("time_limit", "max_work", "gap"):
        value = getattr(options, name)
        if value is not None and not value >= 0:
            raise ValueError(f"--{name.replace('_', '-')} is {value:g}; it must not be negative.")
    if options.wire is not None and options.wire != AUTO:
        # Parsed only for the errors, which should come before the search.
        TableWires.parse(options.wire)
    if (options.wire_auc_loss, options.wire_error) != (None, None):
        if options.wire != AUTO:
            raise ValueError("--wire-auc-loss and --wire-error bound the choice of --wire auto; add it.")
        _wire_bound(options)
    check_output(options.out, force=options.force)
    check_output(options.html, force=options.force, option="--html")


def _find_source(options: PlanOptions) -> Path:
    """Return the path of SOURCE. If it is missing, return the plan of the run given by ``--compare``."""
    if options.source is not None:
        return _plan_of_run(options.source)
    if options.compare is None:
        raise ValueError("name a recipe, a task file or a saved plan, or use --diff OLD NEW.")
    plan = _run_folder_of(run_or_path(options.compare)) / PLAN
    if not plan.is_file():
        raise ValueError(f"--compare {options.compare}: there is no {plan}; name a run, or a SOURCE.")
    return plan


def _plan_of_run(path: Path) -> Path:
    """Return the path of a run's plan, if ``path`` is a run name or folder, else ``path`` itself."""
    folder = run_or_path(path)
    return folder / PLAN if (folder / CONFIG).is_file() else path


def _run_folder_of(compare: Path) -> Path:
    """Return the run folder for the value of ``--compare``, which is the folder or a phases.jsonl in it."""
    return compare if compare.is_dir() else compare.parent


def _make_plan(source: Path, options: PlanOptions) -> PlannedShardingPlan:
    """Load a saved plan, or make a plan for a recipe or task file."""
    # A recipe is a name, module:function, or a Python or YAML file. JSON files are tasks or plans.
    if not source.is_file() or source.suffix in (".py", *YAML_SUFFIXES):
        if source.suffix in (".py", *YAML_SUFFIXES) or str(source) in RECIPES or ":" in str(source):
            return _plan_of_recipe(resolve(str(source)), options)
        raise ValueError(
            f"{source} is neither a file in {Path.cwd()} nor a recipe; give a task file, a saved plan, or "
            f"one of {', '.join(RECIPES)}."
        )
    # Both task files and plans are JSON. Only plans have the entry "planner".
    if "planner" in read_json(source, "a task file or a saved plan"):
        for name in _NEW_PLAN_OPTIONS:
            if getattr(options, name) not in (None, False):
                raise ValueError(
                    f"{source} is a saved plan, which is explained as it is: leave "
                    f"--{name.replace('_', '-')} out. To plan again, give its recipe or task "
                    "file, or --what-if ranks=16,32."
                )
        return load_plan(source)
    task = load_task(source)
    ranks = options.ranks or _RANKS
    memory = None if options.memory_gib is None else int(options.memory_gib * 1024**3)
    hardware = options.hardware or "h100"
    topology = Topology(
        world_size=ranks,
        compute_device=get_profile(hardware).device,
        local_world_size=options.ranks_per_node,
        hardware=hardware,
        hbm_cap=memory,
        ddr_cap=memory,
        **_node_options(options),
    )
    tables = task.tables
    if options.wire == AUTO:
        batch = options.batch_size or task.batch_size(ranks)
        tables = tuple(choose_wires(tables, topology, batch_size=batch, bound=_wire_bound(options)))
    elif options.wire is not None:
        wires = TableWires.parse(options.wire)
        tables = tuple(replace(table, wire=wires.for_table(table.name)) for table in tables)
    return plan_tables(
        tables,
        replace(topology, local_world_size=topology.local_size),
        batch_size=options.batch_size or task.batch_size(ranks),
        effort=_effort(options, _MAX_WORK),
    )


def _plan_of_recipe(recipe: Recipe, options: PlanOptions) -> PlannedShardingPlan:
    """Make a plan for a recipe's tables, with pooling factors measured on the recipe's data."""
    placement, training, ranks = recipe.placement, recipe.training, options.ranks or _RANKS
    if options.batch_size is not None:
        # --batch-size counts samples per rank, and the recipe's counts them over all ranks.
        training = replace(training, batch_size=options.batch_size * ranks)
    hardware = options.hardware or placement.hardware or "cpu"
    memory = placement.memory_gib if options.memory_gib is None else options.memory_gib
    wire = placement.wire if options.wire is None else options.wire
    placement = replace(placement, hardware=hardware, memory_gib=memory, wire=wire)
    if options.wire == AUTO:
        bound = _wire_bound(options)
        placement = replace(placement, wire_auc_loss=bound.auc_loss, wire_error=bound.error)
    recipe = replace(recipe, training=training, placement=placement)
    recipe.check(ranks)
    dataset = recipe.data.load()
    topology = topology_of(
        recipe,
        world_size=ranks,
        local_size=options.ranks_per_node or ranks,
        device=get_profile(hardware).device,
    )
    topology = replace(topology, **_node_options(options))
    effort = _effort(options, DEFAULT_EFFORT.max_work)
    return make_plan(recipe, recipe.model.build(dataset), dataset, topology, effort=effort)


def _node_options(options: PlanOptions) -> dict[str, Any]:
    """Return the `Topology` fields that describe the exchange between nodes, by field name."""
    return {"across_nodes": options.across_nodes or "sums", "packed_ids": options.packed_ids}


def _print_layouts(source: Path, options: PlanOptions) -> None:
    """Measure a recipe's dense part on this machine, and print the step time for every layout.

    Layouts are ways to place the dense part on ranks: replication, sharding or pipeline stages.
    """
    if source.is_file():
        raise ValueError(f"--layouts measures the model of a recipe; {source} is a file. Name a recipe.")
    recipe, ranks = resolve(str(source)), options.ranks or _RANKS
    dataset = recipe.data.load()
    batch_size = recipe.training.batch_size if options.batch_size is None else options.batch_size * ranks
    batch = next(iter(dataset.train.batches(batch_size)))
    profile = get_profile(options.hardware or recipe.placement.hardware or "cpu")
    # Ranks on a single node exchange over the faster links inside the node.
    link = profile.intra if (options.ranks_per_node or ranks) >= ranks else profile.inter
    candidates = layouts(recipe.model.build(dataset), batch.dense, batch.sparse, world_size=ranks, link=link)
    grid = Grid("dense part", "compute, ms", "exchange, ms", "step, ms", "over the best")
    for layout in candidates:
        times = (f"{1e3 * seconds:.3f}" for seconds in (layout.compute, layout.exchange, layout.seconds))
        grid.add_row(layout.name, *times, f"{layout.seconds / candidates[0].seconds:.2f}x")
    Console().print(grid)
    if len(candidates) > 1:
        gain = candidates[1].seconds / candidates[0].seconds - 1.0
        first, second = candidates[0].name, candidates[1].name
        print(f"{first} wins, {gain:.0%} before {second} (measured here; links of {profile.name}).")


def _wire_bound(options: PlanOptions) -> WireBound:
    """Return the limits for ``--wire auto`` from the options, or the default limits."""
    if (options.wire_auc_loss, options.wire_error) == (None, None):
        return WireBound()
    return WireBound(auc_loss=options.wire_auc_loss, error=options.wire_error)


def _effort(options: PlanOptions, max_work: float) -> Effort:
    """Return the search limits from the options. ``max_work`` is the default for ``--max-work``."""
    return Effort(options.time_limit, max_work if options.max_work is None else options.max_work, options.gap)


def _parse_what_if(text: str) -> list[int]:
    """Parse the value of ``--what-if``, such as ``ranks=16,32,64``, to numbers of ranks."""
    name, _, values = text.partition("=")
    try:
        ranks = [int(value) for value in values.split(",")]
        if name != "ranks" or min(ranks) < 1:
            raise ValueError(text)
        return ranks
    except ValueError as error:
        raise ValueError(f"--what-if {text!r}: write ranks=16,32,64.") from error


def _print_comparison(plan: PlannedShardingPlan, path: Path) -> None:
    """Print a table with predicted times per phase, and times measured by a run or in phases.jsonl."""
    measured = (RunFolder(_run_folder_of(path)).read_json(CONFIG) or {}).get("ranks")
    planned = plan.required_inputs().topology.world_size
    if measured not in (None, planned):
        raise ValueError(
            f"--compare {path}: the run had {measured} ranks, the plan is for {planned}; leave SOURCE out to "
            f"compare with the run's own plan, or take --ranks {measured}."
        )
    grid = Grid("phase", "predicted, ms", "measured, ms", "error")
    times = read_phases(path)
    rows = compare(plan, times)
    # A pipelined run has a second file. For other runs, both reads return the same times.
    if path.is_dir() and (hidden := read_phases(path / PHASES_FILE)) != times:
        rows.append(compare_pipelined(plan, times, hidden))
    for row in rows:
        grid.add_row(
            row.phase, f"{row.predicted * 1e3:.3f}", f"{row.measured * 1e3:.3f}", f"{row.error:+.0%}"
        )
    Console().print(grid)
