"""``meshrec plan --data``: predict memory, disk and time for data of a given size."""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table as Grid

from meshrec.cli.arguments import wide_console
from meshrec.cli.progress import duration_text
from meshrec.data.faults import did_you_mean
from meshrec.ops.mapping import memory_limit
from meshrec.planner.data_costs import DataSize, Prediction, as_json, build_disk, predict, total, with_counts
from meshrec.train.recipe import FittedSource, Recipe
from meshrec.train.recipe_files import resolve
from meshrec.train.run_folder import CONFIG, RunFolder, run_or_path

if TYPE_CHECKING:
    from meshrec.data import Dataset
    from meshrec.data.features import Features

OWN = "recipe"
"""Value of ``--data`` for the counts of the recipe's data."""
_WIDTH = 32
"""Default embedding width without a recipe, which then has an Adam optimizer."""
_COUNTS = (
    *("rows", "users", "items", "values", "text_values", "table_rows", "samples", "epochs"),
    *("evaluated_users", "samples_per_second"),
)
"""Names in ``--data``, in addition to ``width``."""
_GB = 1e9
# Width of the table if the output is not a terminal.
_PIPE_WIDTH = 160


def print_data_plan(
    words: Sequence[str], source: Path | None, *, ranks: int, memory_gib: float | None, as_text: bool
) -> None:
    """Predict memory, disk and time, and print them.

    Args:
        words: values of ``--data``: ``NAME=COUNT``, or ``recipe``.
        source: recipe or run; None: all counts are in ``words``.
        ranks: rank count.
        memory_gib: memory of the machine, in GiB; None: of this machine.
        as_text: whether to print a table; otherwise JSON.

    Raises:
        ValueError: a count is missing, wrong or unknown.
    """
    counts = _parse([word for word in words if word != OWN])
    size = _given(counts) if source is None else _of_source(source, counts)
    if not as_text:
        json.dump(as_json(size, ranks), sys.stdout)
        sys.stdout.write("\n")
        return
    parts = predict(size, ranks)
    _print(parts, size, ranks)
    # All ranks are taken to be on one machine.
    limit = memory_limit() if memory_gib is None else memory_gib * 2**30
    needed = total(parts).memory * ranks
    if needed > limit:
        remedy = (
            "set data.histories of the recipe to a folder, where the log is sorted on disk"
            if size.is_log and not size.in_histories
            else "keep rows of tables in files (see the page Larger than memory)"
        )
        print(
            f"look at this: {ranks} x {needed / ranks / _GB:,.1f} GB exceed the {limit / _GB:,.1f} GB of one "
            f"machine. Take more machines, or {remedy}."
        )
    if build_disk(size):
        print(f"building the histories needs up to {build_disk(size) / _GB:,.1f} GB more disk for a while")
    if size.samples_per_second is None:
        print(
            "training steps are not in these times: their speed is unknown. Train on a part of the data, and "
            "name the run as SOURCE, or give samples_per_second=N of one rank"
        )


def _parse(words: Sequence[str]) -> dict[str, Any]:
    """Parse ``NAME=COUNT`` words, such as ``rows=1e9``."""
    counts: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        names = (*_COUNTS, "width")
        if not equals or name not in names:
            raise ValueError(
                f"--data {word}: write NAME=COUNT, such as rows=1e9, with one of {', '.join(names)}; or "
                f"{OWN} alone, for the recipe's data.{did_you_mean(name, names)}"
            )
        if name in counts:
            raise ValueError(f"--data {word}: {name} is given twice. Leave one of them out.")
        try:
            count = float(text)
        except ValueError:
            count = math.nan
        is_integral = name == "samples_per_second" or count == round(count, 0)
        if not (0 < count < math.inf and is_integral):
            raise ValueError(f"--data {word}: {text!r} is not a count. Give a number above 0, such as 2e5.")
        counts[name] = count if name == "samples_per_second" else int(count)
    return counts


def _given(counts: dict[str, Any]) -> DataSize:
    """Return the size that all given counts describe."""
    if "rows" not in counts:
        raise ValueError("--data: rows=COUNT is missing. Give the rows of the log or table, or a SOURCE.")
    log, table = ("users", "items"), ("values", "text_values")
    if any(name in counts for name in log):
        if missing := [name for name in log if name not in counts]:
            raise ValueError(f"--data: a log has users and items; {missing[0]}=COUNT is missing. Give it.")
        if mixed := [name for name in table if name in counts]:
            raise ValueError(f"--data: {mixed[0]} is a count of a table, and users of a log. Leave one out.")
    # Rows, and two moments of Adam, fp32.
    width = counts.pop("width", _WIDTH)
    return DataSize(row_bytes=12 * width, **counts)


def _of_source(source: Path, counts: dict[str, Any]) -> DataSize:
    """Return the size of a recipe's or run's data, except for counts that the caller gives."""
    if "width" in counts:
        raise ValueError(f"--data width={counts['width']}: {source} has its widths. Leave it out.")
    folder = run_or_path(source)
    if (folder / CONFIG).is_file():
        from meshrec.runs.fitting import FEATURES, features_of
        from meshrec.runs.saved_recipe import load_recipe

        run = RunFolder(folder)
        recipe = load_recipe(run)
        features = features_of(run) if (folder / FEATURES).is_file() else None
        size = _size_of_recipe(recipe, features, _speed_of(run))
    else:
        size = _size_of_recipe(resolve(str(source)))
    wrong = ("values", "text_values") if size.is_log else ("users", "items", "evaluated_users")
    for name in wrong:
        if name in counts:
            kind = "log" if size.is_log else "table"
            raise ValueError(f"--data {name}={counts[name]}: the data of {source} is a {kind}. Leave it out.")
    return with_counts(size, counts)


def _size_of_recipe(
    recipe: Recipe, features: "Features | None" = None, samples_per_second: float | None = None
) -> DataSize:
    """Count a recipe's data, which is read, and the rows of its embedding tables.

    Args:
        features: fitted features; None: fit them, if the recipe's data source has features.
    """
    from meshrec.data.features import Vocabulary
    from meshrec.data.features.values import is_text
    from meshrec.planner.module_tables import tables_of_model
    from meshrec.train.log_sources import LogSource

    source: Any = recipe.data
    counts: dict[str, Any] = {}
    if isinstance(source, FittedSource) and features is None:
        features = source.fit()
    if isinstance(source, LogSource):
        assert features is not None
        log = source.interactions(features).log
        dataset = source.dataset_of(log, source.held_out)
        counts = {"rows": log.num_rows, "users": log.num_users, "items": len(log.catalogue)}
        counts["in_histories"] = getattr(source, "histories", None) is not None
        counts["evaluated_users"] = source.evaluated_users
    elif isinstance(source, FittedSource):
        assert features is not None
        dataset = source.dataset(features)
        counts = {"rows": _num_rows(dataset)}
        # Features that share a table have the same values.
        vocabularies = {
            feature.table or feature.name: feature.vocabulary
            for feature in features.features
            if isinstance(feature, Vocabulary)
        }
        for name, is_counted in (("values", False), ("text_values", True)):
            counts[name] = sum(len(of) for of in vocabularies.values() if is_text(of.type) == is_counted)
    else:
        dataset = source.load()
        counts = {"rows": _num_rows(dataset)}
    tables = tables_of_model(recipe.model.build(dataset))
    num_rows = sum(table.num_embeddings for table in tables)
    num_bytes = sum(
        table.num_embeddings * _row_bytes(recipe, table.embedding_dim)
        + table.num_embeddings * table.index_bytes
        for table in tables
    )
    return DataSize(
        **counts,
        table_rows=num_rows,
        row_bytes=num_bytes / max(num_rows, 1),
        samples=dataset.train.num_samples,
        epochs=recipe.training.epochs,
        samples_per_second=samples_per_second,
    )


def _num_rows(dataset: "Dataset") -> int:
    readers = (dataset.train, dataset.validation, dataset.test)
    return sum(reader.num_samples for reader in readers if reader is not None)


def _row_bytes(recipe: Recipe, dim: int) -> int:
    """Return the bytes of a row with ``dim`` weights and the optimizer state, fp32."""
    slots = (slot.shape(1, dim) for slot in recipe.tables.state_slots())
    return 4 * (dim + sum(math.prod(shape) for shape in slots))


def _speed_of(run: RunFolder) -> float | None:
    """Return the samples per second of one rank at the end of a run; None if it has logged no step."""
    speeds = [line["samples_per_second"] for line in run.metrics() if "samples_per_second" in line]
    return speeds[-1] / run.read_json(CONFIG).get("ranks", 1) if speeds else None


def _print(parts: list[Prediction], size: DataSize, ranks: int) -> None:
    """Print a table with a row per resource, and the sum."""
    title = f"ranks: {ranks}, epochs: {size.epochs}, bytes per embedding row: {size.row_bytes:,.0f}"
    grid = Grid(title=title, title_justify="left")
    for name in (
        "resource",
        "count",
        "memory per rank",
        "disk",
        "first start",
        "later starts",
        "training",
        "basis",
    ):
        grid.add_column(name, justify="left" if name in ("resource", "basis") else "right", overflow="fold")
    for part in (*parts, total(parts)):
        grid.add_row(
            part.resource,
            f"{part.num:,.0f}" if part.num else "",
            *(f"{value / _GB:,.2f} GB" if value else "" for value in (part.memory, part.disk)),
            *(duration_text(value) if value else "" for value in (part.before, part.start, part.training)),
            part.basis,
        )
    wide_console(_PIPE_WIDTH).print(grid)
    print(
        "extrapolated: times the largest count with which the cost per unit was measured (the page How big)"
    )
