"""``meshrec runs``: lists training runs, and puts two side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from meshrec.train.report import phase_times
from meshrec.train.run_folder import CONFIG, RUNS, SUMMARY, RunFolder, all_runs, find_run, flat

_PIPE_WIDTH = 140


@dataclass(frozen=True, kw_only=True)
class RunsOptions:
    """Lists the training runs; `meshrec runs compare A B` puts two side by side."""

    words: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[compare A B]", help_behavior_hint="")
    ] = ()
    """Two runs, by name, to put side by side; otherwise all are listed."""
    runs: Path = RUNS
    """Where run folders are."""


def run(options: RunsOptions) -> None:
    """Prints. ValueError for runs that are not there."""
    console = Console()
    console = console if console.is_terminal else Console(width=_PIPE_WIDTH)
    match options.words:
        case ():
            found = all_runs(options.runs)
            if not found:
                raise ValueError(f"{options.runs} holds no run; start one: meshrec train RECIPE.")
            console.print(_list(found))
        case ("compare", first, second):
            for table in compare(find_run(first, options.runs), find_run(second, options.runs)):
                console.print(table)
        case words:
            raise ValueError(
                f"meshrec runs {' '.join(words)}: write `meshrec runs` or `meshrec runs compare A B`."
            )


def compare(first: RunFolder, second: RunFolder) -> list[Table]:
    """Results side by side, then the options that differ."""
    results = Table(title="results", title_justify="left", title_style="bold")
    for name in ("", first.path.name, second.path.name, "change"):
        results.add_column(name, justify="right" if name else "left")
    figures = [dict(_figures(run)) for run in (first, second)]
    for name in {**figures[0], **figures[1]}:
        old, new = (each.get(name) for each in figures)
        change = f"{new - old:+,.4g}" if old is not None and new is not None else ""
        results.add_row(name, _number(old), _number(new), change)
    options = Table(title="options that differ", title_justify="left", title_style="bold")
    for name in ("", first.path.name, second.path.name):
        options.add_column(name)
    configs = [dict(flat(run.read_json(CONFIG) or {})) for run in (first, second)]
    for name in {**configs[0], **configs[1]}:
        old, new = (each.get(name) for each in configs)
        if old != new and name != "began":
            options.add_row(name, _text(old), _text(new))
    return [results, options] if options.row_count else [results]


def _list(found: Sequence[RunFolder]) -> Table:
    table = Table()
    for name in ("run", "recipe", "began", "ranks", "state", "steps", "samples/s", "AUC", "log loss"):
        table.add_column(
            name, justify="right" if name in ("ranks", "steps", "samples/s", "AUC", "log loss") else "left"
        )
    for folder in found:
        config, summary = folder.read_json(CONFIG) or {}, folder.read_json(SUMMARY) or {}
        validation = summary.get("validation", {})
        table.add_row(
            folder.path.name,
            config.get("recipe", {}).get("name", "?"),
            str(config.get("began", "?"))[:16].replace("T", " "),
            str(config.get("ranks", "?")),
            summary.get("state", "running, or ended without a word"),
            _number(summary.get("step")),
            _number(summary.get("samples_per_second")),
            _number(validation.get("auc")),
            _number(validation.get("loss")),
        )
    return table


def _figures(folder: RunFolder) -> list[tuple[str, float]]:
    summary: dict[str, Any] = folder.read_json(SUMMARY) or {}
    found = [(f"validation {name}", value) for name, value in summary.get("validation", {}).items()]
    found += [(name.replace("_", " "), summary[name]) for name in _PLAIN if summary.get(name) is not None]
    for rank in phase_times(folder):
        found += [
            (f"rank {rank['rank']}: {name}, ms", 1e3 * seconds) for name, seconds in rank["phases"].items()
        ]
    return found


_PLAIN = ("step", "samples", "samples_per_second", "train_seconds", "best_step")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if value >= 1000 else f"{value:.4f}"


def _text(value: Any) -> str:
    return "-" if value is None else str(value)
