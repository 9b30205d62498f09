"""``meshrec runs``: list, compare and remove training runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import tyro
from rich.table import Table
from rich.text import Text

from meshrec.cli.arguments import UsageError, check_output, parse, wide_console
from meshrec.data.faults import did_you_mean
from meshrec.metrics.named import leading_text, metric_of, quality
from meshrec.reports.page import to_page
from meshrec.runs.removing import remove_run
from meshrec.runs.report import comparison_data, phase_times
from meshrec.train.run_folder import CONFIG, RUNS, SUMMARY, RunFolder, all_runs, find_run, flatten

# Width of tables if the output is not a terminal.
_PIPE_WIDTH = 140
# Title of the comparison table with metrics.
_RESULTS = "results"


@dataclass(frozen=True, kw_only=True)
class RunsOptions:
    """List training runs.

    `meshrec runs compare A B ...` compares runs, and `meshrec runs rm A ...` removes some.
    """

    runs: Path = RUNS
    """Folder with all runs."""
    state: Literal["running", "stopped", "failed", "finished"] | None = None
    """List only runs in this state."""
    recipe: str | None = None
    """List only runs of this recipe."""
    sort: Literal["began", "name", "state", "steps", "speed", "validation", "loss", "test"] = "began"
    """Column to sort by; the best run is last."""


Names = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Print the results of runs side by side, with changes from the first run, and all differing options."""

    names: Names
    """Two or more run names or folders."""
    runs: Path = RUNS
    """Folder with all runs."""
    out: Path | None = None
    """HTML page to write, with the curves of all runs in the same charts."""
    force: bool = False
    """Replace an existing page."""


@dataclass(frozen=True, kw_only=True)
class RemoveOptions:
    """Remove all files written by MeshRec for runs. A folder with other files is kept, with these files."""

    names: Names
    """Run names or folders."""
    runs: Path = RUNS
    """Folder with all runs."""


_COMMANDS: Mapping[str, type[CompareOptions] | type[RemoveOptions]] = {
    "compare": CompareOptions,
    "rm": RemoveOptions,
}


class Figure(NamedTuple):
    """A value to compare between runs.

    Attributes:
        name: name shown to users.
        value: the value.
        better: 1 if more is better, -1 if less is better, 0 if neither.
    """

    name: str
    value: float
    better: int = 0


# Summary entries to compare, with `Figure.better`.
_SUMMARY_FIGURES = {
    "step": 0,
    "samples": 0,
    "samples_per_second": 1,
    "train_seconds": -1,
    "seconds": -1,
    "weights_step": 0,
}


def main(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in _COMMANDS:
        command = arguments[0]
        options: Any = parse(_COMMANDS[command], arguments[1:], program=f"meshrec runs {command}")
    elif arguments and not arguments[0].startswith("-"):
        raise UsageError(
            f"runs: there is no command {arguments[0]!r}; there are {', '.join(_COMMANDS)}, and "
            f"`meshrec runs` lists the runs.{did_you_mean(arguments[0], _COMMANDS)}"
        )
    else:
        options = parse(RunsOptions, arguments, program="meshrec runs")
    run(options)
    return 0


def run(options: RunsOptions | CompareOptions | RemoveOptions) -> None:
    """List, compare or remove runs, depending on the class of the options.

    Raises:
        ValueError: a run does not exist, or cannot be removed.
    """
    console = wide_console(_PIPE_WIDTH)
    match options:
        case RunsOptions():
            console.print(_runs_table(_select_runs(options)))
        case CompareOptions():
            if len(options.names) < 2:
                raise UsageError("runs compare: name two runs or more. `meshrec runs` lists them.")
            check_output(options.out, force=options.force)
            folders = [find_run(name, options.runs) for name in options.names]
            warnings, comparisons = _warnings(folders), compare(folders)
            for text in warnings:
                console.print(text, style="yellow", soft_wrap=True)
            for comparison in comparisons:
                console.print(comparison.table())
            if options.out is not None:
                tables = [
                    (comparison.title, comparison.head, comparison.plain_rows()) for comparison in comparisons
                ]
                data = comparison_data(folders, tables) | {"warnings": warnings}
                options.out.write_text(to_page("compare.js", data), encoding="utf-8")
                console.print(f"the page: {options.out}")
        case RemoveOptions():
            for folder in [find_run(name, options.runs) for name in options.names]:
                user_files = remove_run(folder)
                console.print(f"removed {folder.path}")
                if user_files:
                    console.print(f"kept in it, because MeshRec did not write it: {', '.join(user_files)}")


def _warnings(runs: Sequence[RunFolder]) -> list[str]:
    """Return a warning for every run that was evaluated on other data than the first run."""
    first, *other_data = [dict(flatten((folder.read_json(CONFIG) or {}).get("data"))) for folder in runs]
    warnings = []
    for other, run in zip(other_data, runs[1:], strict=True):
        differing = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if differing:
            differences = ", ".join(
                f"{name} {first.get(name)} and {other.get(name)}" for name in differing[:3]
            )
            warnings.append(
                f"the data of {runs[0].path.name} and {run.path.name} differ ({differences}): their metrics "
                "are of different samples. Evaluate both on the same data: meshrec evaluate RUN --data FILES."
            )
    return warnings


class Comparison(NamedTuple):
    """Table that compares runs, with a column per run.

    Attributes:
        title: table title.
        head: column names; the first is for the row labels.
        rows: row label, and a cell per run: the value as a string, and a verdict, which is "better", "worse"
            or "".
    """

    title: str
    head: list[str]
    rows: list[tuple[str, list[tuple[str, str]]]]

    def table(self) -> Table:
        """Return a rich table for a terminal, with verdicts in color."""
        table = Table(title=self.title, title_justify="left", title_style="bold")
        for name in self.head:
            table.add_column(name, justify="right" if name and self.title == _RESULTS else "left")
        colors = {"better": "green", "worse": "red", "": ""}
        for label, cells in self.rows:
            texts = [Text(f"{text} {verdict}".rstrip(), style=colors[verdict]) for text, verdict in cells]
            table.add_row(label, *texts)
        return table

    def plain_rows(self) -> list[list[str]]:
        """Return the rows as lists of strings."""
        return [
            [label, *(f"{text} {verdict}".rstrip() for text, verdict in cells)] for label, cells in self.rows
        ]


def compare(runs: Sequence[RunFolder]) -> list[Comparison]:
    """Compare the results of runs with those of the first run, and list options which differ.

    Returns:
        Table with the results, and if any option differs, a table with options.
    """
    names = ["", *(run.path.name for run in runs)]
    figures = [{figure.name: figure for figure in _run_figures(run)} for run in runs]
    results = Comparison(_RESULTS, names, [])
    # A dict instead of a set, to keep the order of the figures.
    for name in {name: None for of_run in figures for name in of_run}:
        row = [of_run.get(name) for of_run in figures]
        results.rows.append((name, [_format_change(row[0], figure) for figure in row]))
    options = Comparison("options that differ", names, [])
    configs = [dict(flatten(_options(run))) for run in runs]
    for name in {name: None for of_run in configs for name in of_run}:
        values = [of_run.get(name) for of_run in configs]
        if any(value != values[0] for value in values):
            options.rows.append((name, [("-" if value is None else str(value), "") for value in values]))
    return [results, options] if options.rows else [results]


def _format_change(first: Figure | None, figure: Figure | None) -> tuple[str, str]:
    """Return a figure with its change from the first run, and the verdict "better", "worse" or ""."""
    if figure is None:
        return "-", ""
    text = _format_number(figure.value)
    if first is None or first is figure:
        return text, ""
    change = figure.value - first.value
    text = f"{text} ({change:+,.4g})"
    # A figure without a direction, such as steps, is neither better nor worse.
    if not change or not figure.better:
        return text, ""
    return text, "better" if (change > 0) == (figure.better > 0) else "worse"


def _options(run: RunFolder) -> dict[str, Any]:
    """Return the configuration entries of a run that `compare` shows, by entry name; None if missing."""
    config = run.read_json(CONFIG) or {}
    return {name: config.get(name) for name in ("recipe", "ranks", "device", "data", "torch")}


def _select_runs(options: RunsOptions) -> list[RunFolder]:
    """Return the runs matching --state and --recipe, sorted by --sort."""
    runs = all_runs(options.runs)
    if not runs:
        raise ValueError(f"there is no run in {options.runs.resolve()}; start one: meshrec train RECIPE.")
    selected = [
        run
        for run in runs
        if options.state in (None, run.state().name) and options.recipe in (None, _recipe_name(run))
    ]
    if not selected:
        raise ValueError(
            f"none of the {len(runs)} runs in {options.runs} matches; leave --state or --recipe out."
        )
    # None for "began": `all_runs` returns the runs in this order.
    key = _KEYS.get(options.sort)
    return (
        selected if key is None else sorted(selected, key=lambda run: key(run, run.read_json(SUMMARY) or {}))
    )


def _recipe_name(folder: RunFolder) -> str:
    """Return the name of a run's recipe, or "?" if it is not recorded."""
    return str((folder.read_json(CONFIG) or {}).get("recipe", {}).get("name", "?"))


def _summary_key(*path: str, sign: int = 1) -> Callable[[RunFolder, Mapping[str, Any]], Any]:
    """Return a key to sort runs by a value in their summary. Runs without it come first."""

    def key(_: RunFolder, summary: Mapping[str, Any]) -> float:
        """Return the value in the summary times ``sign``, or minus infinity if it is missing."""
        value: Any = summary
        for name in path:
            value = (value or {}).get(name)
        return float("-inf") if value is None else sign * float(value)

    return key


_KEYS: Mapping[str, Callable[[RunFolder, Mapping[str, Any]], Any]] = {
    "name": lambda folder, _: folder.path.name,
    "state": lambda folder, _: folder.state().name,
    "steps": _summary_key("step"),
    "speed": _summary_key("samples_per_second"),
    "validation": lambda _, summary: _quality_key(summary.get("validation")),
    "loss": _summary_key("validation", "loss", sign=-1),
    "test": lambda _, summary: _quality_key(summary.get("test")),
}


def _quality_key(metrics: Mapping[str, float] | None) -> float:
    """Return a sort key for metrics, by quality. Runs without metrics come first."""
    worth = quality(dict(metrics or {}))
    return float("-inf") if worth is None else worth


def _runs_table(runs: Sequence[RunFolder]) -> Table:
    """Return a rich table with a row per run."""
    table = Table()
    numeric_columns = ("ranks", "steps", "samples/s", "validation", "test")
    for name in ("run", "recipe", "began", "ranks", "state", *numeric_columns[1:]):
        table.add_column(name, justify="right" if name in numeric_columns else "left")
    for folder in runs:
        config, summary, state = (
            folder.read_json(CONFIG) or {},
            folder.read_json(SUMMARY) or {},
            folder.state(),
        )
        validation, test = summary.get("validation") or {}, summary.get("test") or {}
        table.add_row(
            folder.path.name,
            _recipe_name(folder),
            str(config.get("began", "?"))[:16].replace("T", " "),
            str(config.get("ranks", "?")),
            state.name if state.error is None else f"{state.name}: {state.error}",
            _format_number(summary.get("step") if state.step is None else state.step),
            _format_number(summary.get("samples_per_second")),
            leading_text(validation),
            leading_text(test),
        )
    return table


def _run_figures(folder: RunFolder) -> list[Figure]:
    """Return the figures of a run to compare: metrics, speed and phase times."""
    summary: dict[str, Any] = folder.read_json(SUMMARY) or {}
    figures = [
        Figure(f"{data} {name}", value, metric_of(name).better)
        for data in ("validation", "test")
        for name, value in (summary.get(data) or {}).items()
        if value is not None
    ]
    figures += [
        Figure(name.replace("_", " "), summary[name], better)
        for name, better in _SUMMARY_FIGURES.items()
        if summary.get(name) is not None
    ]
    for rank in phase_times(folder):
        figures += [
            Figure(f"rank {rank['rank']}: {name}, ms", 1e3 * seconds, -1)
            for name, seconds in rank["phases"].items()
        ]
    return figures


def _format_number(value: float | None) -> str:
    """Format a number, with fewer decimals for larger numbers; "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    decimals = next((decimals for most, decimals in ((10, 4), (100, 1)) if abs(value) < most), 0)
    return f"{value:,.{decimals}f}"
