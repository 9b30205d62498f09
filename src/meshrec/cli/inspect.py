"""``meshrec inspect``: look at data, propose a feature for every column, and write a recipe."""

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from meshrec.cli.arguments import Words, check_output, parse
from meshrec.cli.inspect_log import (
    NextItemModel,
    comment_safe,
    constructor_source,
    inspect_log,
    literal_source,
    path_from,
)
from meshrec.cli.progress import shown_progress
from meshrec.data.csv_dialects import DETECTED, CsvFormat
from meshrec.data.log_columns import LogColumns
from meshrec.reports.page import to_page

if TYPE_CHECKING:
    import pyarrow as pa

    from meshrec.data.features import Label
    from meshrec.data.locations import File
    from meshrec.data.profile import Profile
    from meshrec.data.propose import Proposal

# From this row count on, recipes have fewer trees and epochs. A tree takes some 30 ns per sample.
_MANY_ROWS = 400_000
_TREES, _FEWER_TREES = 300, 100
# Source code for model and optimizers, and epochs for few rows. The second has a fitted linear part, for
# binary labels.
_MODELS = (
    (
        "WideDeepConfig()",
        "Adam(lr=2e-3, weight_decay=2.0, decoupled_weight_decay=True)",
        'DenseOptimizer(kind="adamw", lr=1e-3, weight_decay=0.1)',
        4,
    ),
    (
        "WideDeepConfig(fit_wide=True, {trees}shrinkage=3.0, dropout=0.1)",
        "Adam(lr=2e-3)",
        "DenseOptimizer(lr=3e-3)",
        12,
    ),
)
_LOG_OPTIONS = ("user", "item", "item_features", "action", "actions", "rating", "min_rating", "model")
"""Options that are only for logs."""
_CLICK_LOG_OPTIONS = ("--user", "--item", "--item-features")
"""Log options that may be combined with ``--label``."""


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Inspect data, propose a feature for every column, and write a recipe to edit.

    Then: meshrec train recipe.py:recipe
    """

    data: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """Parquet or CSV files, folders or patterns. They provide training, validation and test rows."""
    label: str | None = None
    """Column to learn: two values of any type, numbers, or classes. With --user, --item and --time: column
    with the clicks in a log, learned with a history of earlier clicks. None: learn the next item in a log.
    """
    time: str | None = None
    """Column that orders the rows: the latest rows are held out, and columns growing with time are left out.
    None: rows are held out at random.
    """
    time_format: str | None = None
    """Format of times stored as text, for strptime, such as %d/%m/%Y; none: ISO 8601."""
    user: str | None = None
    """User column of a log."""
    item: str | None = None
    """Item column of a log."""
    action: str | None = None
    """Column of a log with the kind of interaction."""
    actions: Words = ()
    """Kinds of interaction to use; none: all."""
    item_features: Words = ()
    """Further item columns of a log, such as the brand, for --label and --model two_tower."""
    rating: str | None = None
    """Rating column of a log."""
    min_rating: float | None = None
    """Minimum rating of rows to use; none: use all rows."""
    model: NextItemModel | None = None
    """Model that learns the next item of a log; none: hstu."""
    task: Literal["binary", "number", "classes"] | None = None
    """Label type; none: classes for text with three or more values, else binary."""
    skip_unlabelled: bool = False
    """Skip and count rows without a label."""
    query: str | None = None
    """Column with queries, sessions or users: learn to rank the rows of a query by the label, best first."""
    out: Path = Path("recipe.py")
    """Recipe to write."""
    page: Path | None = None
    """Page to write; none: the recipe's name with .html."""
    delimiter: str | None = None
    """Delimiter of CSV files; none: detect it."""
    decimal_point: Literal[".", ","] | None = None
    """Decimal point of numbers in CSV files; none: detect it."""
    encoding: str | None = None
    """Character encoding of CSV files, such as latin-1; none: UTF-8, or UTF-16 with a byte order mark."""
    rows: int | None = None
    """Inspect this many rows only, spread over the data; none: all rows."""
    nproc: int = 1
    """Number of processes that read Parquet files, each a share of the row groups."""
    force: bool = False
    """Replace an existing recipe and page."""

    @property
    def csv_format(self) -> CsvFormat:
        """CSV format given by --delimiter, --decimal-point and --encoding."""
        return CsvFormat(delimiter=self.delimiter, decimal_point=self.decimal_point, encoding=self.encoding)


def main(arguments: Sequence[str]) -> int:
    options = parse(InspectOptions, arguments, program="meshrec inspect")
    page = options.page or options.out.with_suffix(".html")
    # Check the options before the data is read, which may take minutes.
    log = _log_columns(options)
    check_output(options.out, force=options.force)
    if options.rows is not None and options.rows < 1:
        raise ValueError(f"--rows is {options.rows}; it must be at least 1.")
    if options.nproc < 1:
        raise ValueError(f"--nproc is {options.nproc}; it must be at least 1.")
    if log is not None:
        return inspect_log(
            options.data,
            log,
            options.out,
            label=options.label,
            model=options.model or "hstu",
            form=options.csv_format,
        )
    check_output(page, force=options.force, option="--page")
    from meshrec.data.propose import as_json

    data_profile, proposal = inspect_table(options)
    options.out.write_text(recipe_text(options, proposal, data_profile.num_rows), encoding="utf-8")
    data = as_json(data_profile, proposal) | {
        "data": list(options.data),
        "label": options.label,
        "time": options.time,
    }
    page.write_text(to_page("inspect.js", data), encoding="utf-8")
    _print(proposal, data_profile.num_rows)
    print(f"the page: {page}\nthe recipe, to read and to edit: {options.out}")
    if not _loss_source(proposal.features.labels)[0] and not _has_lightgbm():
        print('for a better model: pip install "meshrec[lightgbm]", and inspect again: it adds boosted trees')
    print(f"to train it: meshrec train {quote(f'{options.out}:recipe')}")
    return 0


def _has_lightgbm() -> bool:
    """Return whether LightGBM is installed, without importing it."""
    return importlib.util.find_spec("lightgbm") is not None


def _log_columns(options: InspectOptions) -> LogColumns | None:
    """Return the log columns given by the options, or None if the data is a table with a label instead."""
    given = [f"--{name.replace('_', '-')}" for name in _LOG_OPTIONS if getattr(options, name)]
    if options.label is not None and not given:
        return None
    if options.user is None or options.item is None or options.time is None:
        if options.label is None:
            raise ValueError(
                "neither --label nor a log is given. Give --label, or --user, --item and --time of a log."
            )
        raise ValueError(
            f"--label {options.label} with {given[0]}: a log of clicks also has --user, --item and --time. "
            "Give all three, or --label alone."
        )
    if options.label is not None and (
        unused := [option for option in given if option not in _CLICK_LOG_OPTIONS]
    ):
        raise ValueError(
            f"--label {options.label} with {unused[0]}: with a label, every row of the log counts, and DIN "
            "learns. Leave one of them out."
        )
    if options.item_features and options.label is None and options.model != "two_tower":
        raise ValueError(
            f"--item-features {options.item_features[0]}: {options.model or 'hstu'} reads items only. Add "
            "--model two_tower or a --label, or leave them out."
        )
    for option, default in (("query", None), ("task", None), ("rows", None), ("page", None), ("nproc", 1)):
        if getattr(options, option) != default:
            raise ValueError(
                f"--{option} {getattr(options, option)} is for other tables than a log. Leave it out."
            )
    return LogColumns(
        user=options.user,
        item=options.item,
        time=options.time,
        time_format=options.time_format,
        action=options.action,
        actions=options.actions,
        item_features=options.item_features,
        rating=options.rating,
        min_rating=options.min_rating,
    )


def inspect_table(options: InspectOptions) -> "tuple[Profile, Proposal]":
    """Read a table completely, and propose features."""
    from meshrec.data.propose import propose

    assert options.label is not None
    with shown_progress("reading the rows") as tell:
        data_profile = _profile(options, options.label, tell)
    return data_profile, propose(
        data_profile,
        label=options.label,
        time=options.time,
        task=options.task,
        query=options.query,
        skip_unlabelled=options.skip_unlabelled,
    )


def _profile(options: InspectOptions, label: str, tell: Callable[[float], None]) -> "Profile":
    """Return statistics per column. Call ``tell`` with the finished share of the rows."""
    from meshrec.data.locations import expand_tables
    from meshrec.data.parquet_tables import ParquetTables
    from meshrec.data.profile import profile
    from meshrec.data.profile_processes import profile_parquet

    convert = partial(_with_times, column=options.time, time_format=options.time_format)
    files, text = expand_tables(list(options.data))
    if text:
        if options.nproc > 1:
            raise ValueError(
                f"--nproc {options.nproc}: {files[0]} is a text file, which one process reads into memory. "
                "Leave --nproc out, or write the rows to Parquet files."
            )
        return profile(map(convert, _read_csvs(files, options.csv_format)), label)
    tables = ParquetTables.open(files, options.rows)
    num_shares = len(tables.shares(options.nproc))
    if 0 < num_shares < options.nproc:
        print(
            f"{num_shares} of {options.nproc} processes read the data: a row group is not divided, and small "
            "ones are read together",
            file=sys.stderr,
        )
    return profile_parquet(tables, label, nproc=options.nproc, convert=convert, tell=tell)


def _with_times(table: "pa.Table", column: str | None, time_format: str | None) -> "pa.Table":
    """Parse the strings in a column as times. Without column or format, return the table unchanged."""
    if column is None or time_format is None:
        return table
    from meshrec.data.faults import DataError
    from meshrec.data.features.values import kind_of, parse_times, whole

    if column not in table.column_names or kind_of(table[column].type) != "text":
        return table
    try:
        times = parse_times(whole(table[column]), time_format)
    except DataError as error:
        raise DataError(
            f"--time-format: column {column!r}: {error}. Give the format of all its texts."
        ) from error
    return table.set_column(table.column_names.index(column), column, times)


def _read_csvs(files: "Sequence[File]", form: CsvFormat) -> Iterator["pa.Table"]:
    """Read CSV files, and yield a table per file."""
    import pyarrow as pa

    from meshrec.data.faults import DataError
    from meshrec.data.frames import read_csvs

    names: list[str] | None = None
    for file, table in zip(files, read_csvs(files, form=form), strict=True):
        names = names or table.column_names
        if differ := sorted(set(names) ^ set(table.column_names)):
            raise DataError(f"{file} and {files[0]} differ in {differ}. Give files of one form.")
        for field in table.schema:
            if pa.types.is_binary(field.type):
                raise DataError(
                    f"{file}: column {field.name!r} has bytes that are not UTF-8, as Latin-1 files have. "
                    "Name the encoding: --encoding latin-1"
                )
        yield table


def recipe_text(options: InspectOptions, proposal: "Proposal", num_rows: int) -> str:
    """Return a recipe for a table as Python source code.

    Args:
        options: options of the command.
        proposal: proposed features.
        num_rows: row count, from which batch size and epochs are derived.
    """
    from meshrec.data.locations import expand_tables

    source = "Csv" if expand_tables(options.data)[1] else "Parquet"
    features = proposal.features
    kinds = sorted({type(feature).__name__ for feature in features.features} | {"Features", "Label"})
    labels = ", ".join(map(constructor_source, features.labels)) + ("," if len(features.labels) == 1 else "")
    loss, names = _loss_source(features.labels)
    # Without a line for the loss, labels are binary, and the linear part can be fitted.
    model, tables, dense, epochs = _MODELS[not loss]
    trees = _TREES
    if num_rows >= _MANY_ROWS:
        epochs, trees = 4, _FEWER_TREES
    model = model.format(trees=f"fit_trees={trees}, " if _has_lightgbm() else "")
    # Tables start near zero and need many updates, so few rows need small batches.
    batch = 2 ** round(math.log2(min(max(num_rows / 600, 32), 8192)))
    # Twice per epoch; 80 % of the rows are for training.
    every = max(1, num_rows * 8 // 10 // batch // 2)
    # Samples in a query share a loss, so they cannot be compared by a paired test.
    patience = "chance_patience=6" if options.query is None else "patience=6"
    split = 'split_by="random"'
    form = options.csv_format
    csv = "" if form == DETECTED else f"\n            csv={constructor_source(form)},"
    if options.query is not None:
        split = f'split_by="hash",\n            split_column={literal_source(options.query)}'
    if options.time is not None:
        split = f'split_by="time",\n            split_column={literal_source(options.time)}'
        if options.time_format is not None:
            split += f",\n            split_time_format={literal_source(options.time_format)}"
    import_of_format = "from meshrec.data.csv_dialects import CsvFormat\n" if csv else ""
    used = {"DenseOptimizer", "Recipe", "Schedule", "Training", "WideDeepConfig", source, *names}
    imports = ", ".join(sorted(used, key=str.lower))
    warnings = "".join(f"# Look at this: {warning}.\n" for warning in proposal.warnings)
    columns = "\n".join(_column_lines(proposal))
    return f'''"""Recipe that `meshrec inspect` proposed for {num_rows:,} rows: change what you know better.

Train it: meshrec train {quote(f"{options.out}:recipe")}
"""

{import_of_format}from meshrec.data.features import {", ".join(kinds)}
from meshrec.optim import Adam
from meshrec.train import {imports}

{warnings}FEATURES = Features(
    labels=({labels}),
    features=(
{columns}
    ),
)


def recipe() -> Recipe:
    """Wide & deep on these columns."""
    return Recipe(
        name={literal_source(options.out.stem)},
        data={source}(
            train={literal_source(tuple(path_from(options.out.parent, path) for path in options.data))},{csv}
            {split},
            features=FEATURES,
        ),
        # Tables begin near zero: a row that training never meets adds nothing to a score.
        model={model},{loss}
        tables={tables},
        dense={dense},
        schedule=Schedule(decay="linear"),
        # Half an epoch is between evaluations: three epochs tell whether training pays.
        training=Training(batch_size={batch}, epochs={epochs}, evaluate_every={every}, {patience}),
    )
'''


def _column_lines(proposal: "Proposal") -> list[str]:
    """Return the recipe's source lines for the features, with the reason for every column as a comment."""
    lines = []
    for choice in proposal.choices:
        if not choice.features:
            lines.append(f"        # {comment_safe(choice.column)}: {choice.role}: {choice.reason}")
        for number, feature in enumerate(choice.features):
            lines += [] if number else [f"        # {choice.reason}"]
            lines.append(f"        {constructor_source(feature)},")
    return lines


def _loss_source(labels: "Sequence[Label]") -> tuple[str, list[str]]:
    """Return the source line that sets the loss in the generated recipe, and the class names to import.

    Both are empty for binary labels, which use the default loss.
    """
    if labels[-1].kind == "query":
        return '\n        loss=Ranking(kind="listwise"),', ["Ranking"]
    if labels[0].kind == "class":
        return f"\n        loss=Softmax(classes={literal_source(labels[0].classes)}),", ["Softmax"]
    if labels[0].kind == "number":
        return "\n        loss=SquaredError(),", ["SquaredError"]
    return "", []


def _print(proposal: "Proposal", num_rows: int) -> None:
    """Print a table with the proposed features, and then the warnings."""
    console = Console()
    table = Table(title=f"{num_rows:,} rows", title_justify="left")
    for name in ("column", "becomes", "because", "rows of its table"):
        table.add_column(name, justify="right" if name.startswith("rows") else "left", overflow="fold")
    for choice in proposal.choices:
        table.add_row(choice.column, choice.role, choice.reason, f"{choice.rows:,}" if choice.rows else "")
    console.print(table)
    for warning in proposal.warnings:
        console.print(f"look at this: {warning}", style="yellow", highlight=False)
