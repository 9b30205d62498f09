"""``meshrec leaderboard``: train several models on the same data, and compare them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from meshrec.cli.arguments import check_output, parse
from meshrec.cli.inspect import InspectOptions, inspect_table, recipe_text
from meshrec.durable import scratch_folder
from meshrec.reports.page import to_page

if TYPE_CHECKING:
    from meshrec.runs.leaderboard import LeaderboardEntry


@dataclass(frozen=True, kw_only=True)
class LeaderboardOptions:
    """Train wide & deep, DLRM, DCN, DeepFM, logistic regression and LightGBM on your data, and compare them.

    All models read the features proposed by `meshrec inspect`, on the same split. Validation rows select the
    weights, and test rows are read once. LightGBM is included if installed.
    """

    data: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """Parquet or CSV files, folders or patterns. They provide training, validation and test rows."""
    label: str
    """Column to learn: two values, such as 0 and 1 or two strings, or numbers."""
    time: str | None = None
    """Column that orders the rows: the latest rows are held out. None: rows are held out at random."""
    models: tuple[str, ...] = ("wide_deep", "dlrm", "dcn", "deepfm")
    """Models to train."""
    epochs: int | None = None
    """Maximum number of passes over the training data; none: as in the proposed recipe."""
    seed: int = 0
    """Seed for split, initial weights and sample order."""
    out: Path = Path("leaderboard.html")
    """Page to write."""
    force: bool = False
    """Replace an existing page."""


def main(arguments: Sequence[str]) -> int:
    options = parse(LeaderboardOptions, arguments, program="meshrec leaderboard")
    check_output(options.out, force=options.force)
    if options.epochs is not None and options.epochs < 1:
        raise ValueError(f"--epochs is {options.epochs}; it must be at least 1.")
    from meshrec.data.locations import is_address
    from meshrec.runs.leaderboard import leaderboard
    from meshrec.train.recipe_files import resolve

    console = Console()
    # Relative paths would not work, because the recipe is written to a scratch folder.
    paths = tuple(path if is_address(path) else str(Path(path).absolute()) for path in options.data)
    inspect_options = InspectOptions(data=paths, label=options.label, time=options.time)
    profile, proposal = inspect_table(inspect_options)
    with scratch_folder("meshrec-leaderboard") as folder:
        path = folder / "recipe.py"
        text = recipe_text(replace(inspect_options, out=path), proposal, profile.num_rows)
        path.write_text(text, encoding="utf-8")
        # Executes the proposed recipe, as `meshrec train` would.
        recipe = resolve(f"{path}:recipe")
    data: Any = recipe.data
    training = replace(recipe.training, seed=options.seed, epochs=options.epochs or recipe.training.epochs)
    recipe = replace(recipe, data=replace(data, seed=options.seed), training=training)
    standings = leaderboard(
        recipe, models=options.models, tell=lambda text: console.print(f"training {text}", highlight=False)
    )
    console.print(_table(standings))
    rows = [standing._asdict() for standing in standings]
    about = {"data": list(options.data), "label": options.label, "rows": profile.num_rows, "models": rows}
    options.out.write_text(to_page("leaderboard.js", about), encoding="utf-8")
    print(f"the page: {options.out}")
    return 0


def _table(standings: "Sequence[LeaderboardEntry]") -> Table:
    """Return a rich table with a row per leaderboard entry, models in bold."""
    table = Table(title="test AUC, best first", title_justify="left")
    for name in ("", "validation", "test", "95 %"):
        table.add_column(name, justify="right" if name else "left")
    for standing in standings:
        low, high = standing.interval
        style = "bold" if standing.kind == "model" else None
        table.add_row(
            standing.model,
            f"{standing.validation:.4f}",
            f"{standing.test:.4f}",
            f"{low:.4f} to {high:.4f}",
            style=style,
        )
    return table
