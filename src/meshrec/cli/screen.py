"""Print a training run's progress: as a progress bar in a terminal, elsewhere as lines, with a summary."""

from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from meshrec.cli.progress import RemainingTime
from meshrec.metrics.named import leading_metric, leading_text, metric_title, shown
from meshrec.planner import PlannedShardingPlan
from meshrec.planner.plan_report import PlanReport, make_report
from meshrec.runs.worker import next_commands
from meshrec.train.losses import NextItem
from meshrec.train.observers import (
    Evaluated,
    Event,
    Finished,
    Line,
    Logged,
    Observer,
    Progressed,
    Reported,
    Started,
    Stepped,
)
from meshrec.train.run_folder import CONFIG, RunFolder

# Width if the output is not a terminal. rich would wrap lines at 80.
_PIPE_WIDTH = 120
# Maximum number of ranks in a plan, of tables per rank, and of failed saves to print.
_MAX_RANKS = 16
_MAX_NAMES = 8
_MAX_FAILURES = 3
_MIB = 2**20


def make_screen(*, quiet: bool) -> Callable[[RunFolder], Observer]:
    """Return a function that creates the screen observer for a run folder.

    The observer is a `LiveScreen` on a terminal unless ``quiet``, else a `LineScreen`.
    """
    console = Console()
    if quiet or not console.is_terminal:
        return lambda folder: LineScreen(folder, Console(width=_PIPE_WIDTH, highlight=False))
    return lambda folder: LiveScreen(folder, console)


class LineScreen:
    """Observer that prints a line per event, for logs and pipes.

    Args:
        folder: run folder.
        console: console to print to.
    """

    def __init__(self, folder: RunFolder, console: Console) -> None:
        self._folder, self._print = folder, console.print
        self._remaining = RemainingTime()

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                self._print(headline(event), soft_wrap=True)
                if event.plan is not None:
                    for line in plan_lines(make_report(event.plan)):
                        self._print(f"  {line}", soft_wrap=True)
            case Logged(line) if line["kind"] == "train":
                self._print(
                    f"step {line['step']:>6}  {_position_text(line)}  loss {_format_loss(line)}  "
                    f"{_leading_text(line)}  {line['samples_per_second']:,.0f} samples/s"
                )
            case Evaluated(line, is_best):
                self._print(validation_text(line, is_best))
            case Reported(text):
                self._print(text, soft_wrap=True)
            case Finished(summary):
                if _has_metrics(summary):
                    self._print(summary_table(summary))
                for text in closing_lines(self._folder, summary):
                    self._print(text, soft_wrap=True)
            case Logged():
                pass  # a delta, of which there are too many
            case Progressed(task, share):
                remaining = self._remaining.line(task, share)
                if remaining is not None:
                    self._print(remaining)
            case Stepped():
                pass


class LiveScreen:
    """Observer for terminals: prints the plan, a progress bar with speed and loss, and the summary.

    Args:
        folder: run folder.
        console: console to print to.
    """

    def __init__(self, folder: RunFolder, console: Console) -> None:
        self._folder, self._console = folder, console
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TextColumn("{task.fields[quality]}"),
            TimeRemainingColumn(),
            console=console,
            # The bar disappears at the end, and the summary remains.
            transient=True,
        )
        # Task of the progress bar. Set by the first event Progressed or Started; other updates before it are
        # ignored.
        self._task: TaskID | None = None

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                self._start(event)
            case Stepped(step, _) if self._task is not None:
                self._progress.update(self._task, completed=step)
            case Logged(line) if self._task is not None and line["kind"] == "train":
                self._progress.update(
                    self._task,
                    speed=f"[cyan]{line['samples_per_second']:,.0f} samples/s",
                    quality=f"loss {_format_loss(line)}  {_leading_text(line)}",
                )
            case Progressed(task, share):
                if self._task is None:
                    # Features are fitted before the event Started.
                    self._task = self._progress.add_task(task, speed="", quality="")
                    self._progress.start()
                self._progress.update(
                    self._task, description=task, total=100, completed=100 * share, speed="", quality=""
                )
            case Evaluated(line, is_best):
                self._progress.console.print(validation_text(line, is_best))
            case Reported(text):
                self._progress.console.print(f"[dim]{text}")
            case Finished(summary):
                self._progress.stop()
                if _has_metrics(summary):
                    self._console.print(summary_table(summary))
                for text in closing_lines(self._folder, summary):
                    self._console.print(text)
            case _:
                pass

    def _start(self, event: Started) -> None:
        """Print the heading and the plan, and start the progress bar."""
        self._console.print(headline(event))
        if event.plan is not None:
            self._console.print(plan_table(event.plan))
        # The bar of an earlier task, such as fitting features.
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(
            "training", total=event.num_steps, completed=event.first_step, speed="", quality=""
        )
        self._progress.start()


def headline(start: Started) -> str:
    """Return the heading for a run: recipe, data, ranks, steps and parameter counts."""
    where = f"{start.num_ranks} rank{'s' if start.num_ranks > 1 else ''} on {start.device}"
    again = f", from step {start.first_step}" if start.first_step else ""
    if start.num_samples is None:
        data = f"the stream {start.dataset}"
    else:
        data = (
            f"{start.num_samples:,} samples of {start.dataset} ({start.num_validation:,} for validation, "
            f"{start.num_test:,} for the test)"
        )
    steps = "steps" if start.num_steps is None else count_text(start.num_steps, "step")
    return (
        f"[bold]{start.recipe.name}[/bold]: {data}, {where}, {steps} of "
        f"{start.recipe.training.batch_size:,}{again}\n"
        f"{_format_count(start.num_table_parameters)} parameters in tables, "
        f"{_format_count(start.num_dense_parameters)} in the dense part"
    )


def plan_table(plan: PlannedShardingPlan) -> Table:
    """Return a rich table about a sharding plan, with a row per rank."""
    report = make_report(plan)
    table = Table(title=f"the plan: {_format_types(report)}", title_justify="left", title_style="")
    for name in ("rank", "tables", "memory, MiB", "predicted, ms"):
        table.add_column(name, justify="left" if name == "tables" else "right")
    for rank in report.ranks[:_MAX_RANKS]:
        table.add_row(
            str(rank.rank),
            _tables_of_rank(report, rank.rank),
            f"{rank.num_bytes / _MIB:,.1f}",
            f"{1e3 * sum(rank.phases.values()):.2f}",
        )
    return table


def plan_lines(report: PlanReport) -> list[str]:
    """Return lines about a sharding plan: sharding types, and a line per rank."""
    ranks = [
        f"rank {rank.rank}: {_tables_of_rank(report, rank.rank)} ({rank.num_bytes / _MIB:,.1f} MiB)"
        for rank in report.ranks[:_MAX_RANKS]
    ]
    return [f"plan: {_format_types(report)}", *ranks]


def validation_text(line: Line, is_best: bool) -> str:
    """Return a line with the result of an evaluation."""
    best = "  [green](best so far)[/green]" if is_best else ""
    more = "" if leading_metric(line) is None else f"  loss {_format_loss(line)}"
    return f"{line['kind']} at step {line['step']:>6}: {leading_text(line)}{more}{best}"


def _format_loss(line: Line) -> str:
    """Format the loss, or return "-" if it is missing because all samples were skipped as damaged."""
    return f"{line['loss']:.4f}" if "loss" in line else "-"


def _has_metrics(summary: Line) -> bool:
    """Return whether the run was evaluated on held-out data, which a stream does not have."""
    return bool(summary["validation"] or summary["test"])


def summary_table(summary: Line) -> Table:
    """Return a rich table with the metrics of run and baselines, on validation and test data."""
    title = f"the weights of step {summary['weights_step']:,}"
    table = Table(title=title, title_justify="left", title_style="bold")
    metrics = {**summary["validation"], **summary["test"]}
    columns = shown(metrics)
    for name in ("", "data", *map(metric_title, columns)):
        table.add_column(name, justify="left" if name in ("", "data") else "right")
    for data, key in (("validation", "baselines"), ("test", "baselines_test")):
        for name, quality in summary[key].items():
            table.add_row(name, data, *_format_metrics(quality, columns))
        if summary[data]:
            table.add_row(summary["recipe"], data, *_format_metrics(summary[data], columns), style="bold")
        if data == "validation" and summary.get("best_possible_auc"):
            table.add_row("the best possible", data, f"{summary['best_possible_auc']:.4f}", "", "", "")
    return table


def closing_lines(folder: RunFolder, summary: Line) -> list[str]:
    """Return the last lines to print for a run: speed, files, and commands to continue with."""
    path = folder.path
    lines = [
        f"{summary['state']} at step {summary['step']:,}: {summary['seconds']:.1f} s in all, "
        f"{summary['train_seconds']:.1f} s of them training; {summary['samples']:,} samples, "
        f"{summary['samples_per_second']:,.0f} samples/s while training"
    ]
    lines += [f"no checkpoint was saved: {failure}" for failure in summary["failed_saves"][-_MAX_FAILURES:]]
    lines += [
        f"skipped {count_text(sum(reasons.values()), 'row')} of {file}"
        for file, reasons in summary["skipped"].items()
    ]
    if summary["state"] == "failed":
        lines.append(f"[bold red]failed[/bold red]: {summary['error']}")
    lines += [summary["winner"]] if summary.get("winner") else []
    lines += [f"[yellow]look at this[/yellow]: {text}" for text in summary.get("remarks", [])]
    commanded = next_commands(folder)
    if summary["state"] == "stopped":
        lines.append(f"stopped as requested, with a checkpoint; to continue: {commanded['resume']}")
    if summary["checkpoints"]["weights"]:
        lines.append(f"the weights:  {summary['checkpoints']['weights']}")
        lines.append(f"export them:  {commanded['export']}")
        if summary.get("final"):
            lines.append(f"second fit:   {summary['final']['folder']}, on all rows")
        elif summary.get("held_back"):
            lines.append(f"on all rows:  {commanded['final']}")
        use = "recommend" if _learned_next_items(folder) else "predict"
        lines += [f"{name + ':':13} {commanded[name]}" for name in ("evaluate", use, "package", "serve")]
    if summary["checkpoints"]["last"]:
        lines.append(f"last step:    {summary['checkpoints']['last']}")
    lines += [f"the run:      {path / 'report.html'}", f"the plan:     {path / 'plan.html'}"]
    # A run on a stream writes none.
    if any(path.glob("events.out.tfevents.*")):
        lines.append(f"TensorBoard:  tensorboard --logdir {path.parent}")
    return [*lines, "all runs:     meshrec runs"]


def _learned_next_items(folder: RunFolder) -> bool:
    """Return whether the run trained a next-item model, with the loss `NextItem`."""
    recipe = (folder.read_json(CONFIG) or {}).get("recipe", {})
    return bool(recipe.get("loss", {}).get("type") == NextItem.__name__)


def count_text(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 row" or "1,000 rows"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _format_types(report: PlanReport) -> str:
    """Return the number of tables per sharding type, such as "3 row-wise, 1 table-wise"."""
    counts: dict[str, int] = {}
    for table in report.tables:
        kind = table.sharding_type.replace("_", "-")
        counts[kind] = counts.get(kind, 0) + 1
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


def _tables_of_rank(report: PlanReport, rank: int) -> str:
    """List the tables on a rank, with the share of every table that the rank holds."""
    shares = []
    for table in report.tables:
        if table.name in report.replicated:
            shares.append(f"{table.name} (copy)")
            continue
        held = [r for r in table.rectangles if r[4] == rank]
        if not held:
            continue
        part = sum(rows * columns for _, _, rows, columns, _ in held)
        share = part / (table.num_embeddings * table.embedding_dim)
        kind = table.sharding_type.replace("_shard", "").replace("_", "-")  # such as "row-wise"
        shares.append(table.name if share == 1 else f"{table.name} ({share:.0%}, {kind})")
    return ", ".join(shares[:_MAX_NAMES]) + (
        f" and {len(shares) - _MAX_NAMES} more" if len(shares) > _MAX_NAMES else ""
    )


def _format_metrics(quality: Line, columns: Iterable[str]) -> list[str]:
    """Format metrics as table cells, "-" for missing metrics."""
    return [f"{quality[name]:.4f}" if name in quality else "-" for name in columns]


def _position_text(line: Line) -> str:
    """Format the position in the data: the epoch, or in a stream the age of the newest event."""
    return f"epoch {line['epoch']:.2f}" if "epoch" in line else f"lag {line['lag']:.1f} s"


def _leading_text(line: Line) -> str:
    """Format the metric that selects the best weights, such as "AUC 0.7906"; empty if it is the loss."""
    return "" if leading_metric(line) is None else leading_text(line)


def _format_count(number: Any) -> str:
    """Return a count with a unit, such as "1.5 M"."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return str(number)
