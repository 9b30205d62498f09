"""Print plan reports, what-if tables and plan differences in the terminal."""

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table

from meshrec.plan.text import size_text
from meshrec.planner.plan_file import PlannedShardingPlan
from meshrec.planner.plan_report import Move, PlanReport

# Maximum rank count to list.
_MOST_RANKS = 64
# Maximum number of table names to list per rank.
_MOST_NAMES = 6
# Characters per line in files and pipes, so that table columns are not cut.
_PIPE_WIDTH = 160


def render(report: PlanReport, *, console: Console | None = None) -> None:
    """Print a plan report to the terminal.

    The report has the step time by phase, a line per rank, the warnings, and the optimality gap. The gap
    bounds how much faster the best plan could be.
    """
    (console or _console()).print(_report(report))


def render_what_if(
    plans: Sequence[tuple[int, PlannedShardingPlan | str]], *, console: Console | None = None
) -> None:
    """Print a table of plans for several world sizes, with a line per world size."""
    table = Table("ranks", "step, ms", "lower bound, ms", "gap", "fullest rank", "samples/s")
    for world_size, plan in plans:
        # No plan fits on this number of ranks. The first line of the error says so.
        if isinstance(plan, str):
            table.add_row(str(world_size), plan.splitlines()[0], "", "", "", "")
            continue
        inputs = plan.required_inputs()
        fullest = plan.estimate().bytes_R.max()
        table.add_row(
            str(world_size),
            f"{plan.seconds * 1e3:.3f}",
            f"{plan.lower_bound * 1e3:.3f}",
            f"{plan.gap:.2%}",
            size_text(fullest),
            f"{inputs.batch_size * inputs.topology.world_size / plan.seconds:,.0f}",
        )
    (console or _console()).print(table)


def render_diff(moves: Sequence[Move], *, console: Console | None = None) -> None:
    """Print the tables which differ between two plans; see `plan_report.diff`."""
    console = console or _console()
    if not moves:
        console.print("the plans place every table identically")
        return
    table = Table("table", "was", "becomes", "moves [MiB]")
    for move in moves:
        table.add_row(
            move.table, move.old_type or "-", move.new_type or "-", f"{move.num_bytes / 2**20:,.2f}"
        )
    console.print(table)
    total = sum(move.num_bytes for move in moves) / 2**20
    console.print(f"{len(moves)} tables change; {total:,.2f} MiB move between ranks")


def _console() -> Console:
    """Return a console for standard output. Files and pipes get wide lines."""
    console = Console()
    return console if console.is_terminal else Console(width=_PIPE_WIDTH)


def _report(report: PlanReport) -> RenderableType:
    """Lay out the report: a table of phases, a table of ranks, then warnings and the result in sentences."""
    # Phases that the plan does not use would only widen the tables.
    used = [phase for phase, seconds in report.phases.items() if seconds > 0]
    title = "one training step, without the dense part"
    summary = Table("phase", "slowest rank, ms", title=title, min_width=len(title))
    for phase in used:
        summary.add_row(phase, f"{report.phases[phase] * 1e3:.3f}")
    summary.add_row("step", f"{report.seconds * 1e3:.3f}", style="bold")
    # Equal if a pipeline has nothing to hide.
    if report.pipelined_seconds < report.seconds:
        summary.add_row("step, pipelined", f"{report.pipelined_seconds * 1e3:.3f}")
    title = "rank by rank, without latencies, which all ranks share"
    ranks = Table("rank", "memory", *(f"{phase}, ms" for phase in used), "tables", title=title)
    for rank in report.ranks[:_MOST_RANKS]:
        names = ", ".join(rank.tables[:_MOST_NAMES])
        more = len(rank.tables) - _MOST_NAMES
        ranks.add_row(
            str(rank.rank),
            f"{size_text(rank.num_bytes)} / {size_text(report.memory_cap)}",
            *(f"{rank.phases[phase] * 1e3:.3f}" for phase in used),
            f"{names} and {more} more" if more > 0 else names,
        )
    lines: list[RenderableType] = [summary, ranks]
    if len(report.ranks) > _MOST_RANKS:
        lines.append(f"... and {len(report.ranks) - _MOST_RANKS} more ranks (see --json or --html)")
    if report.replicated:
        lines.append(f"on every rank (data-parallel): {len(report.replicated)} tables")
    sent = report.sent_bytes
    if any(sent.values()):
        lines.append(
            f"a step sends {size_text(sent['output'])} of embeddings and {size_text(sent['gradient'])} of "
            f"gradients, encoded as {', '.join(report.wire)}, and {size_text(sent['ids'])} of IDs"
        )
    lines += [f"[yellow]warning:[/yellow] {warning}" for warning in report.warnings]
    lines.append(
        f"step {report.seconds * 1e3:.3f} ms on {report.world_size} ranks ({report.hardware}); proven: "
        f"no plan is faster than {report.lower_bound * 1e3:.3f} ms (gap {report.gap:.2%})"
    )
    return Group(*lines)
