"""``meshrec tune``: search a recipe's options, and train with several seeds."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshrec.cli.arguments import HELP, UsageError, Words, parse_known
from meshrec.cli.arguments import parse as parse_arguments
from meshrec.cli.on_ranks import on_ranks
from meshrec.cli.recipe_help import recipe_help
from meshrec.cli.train import parse, split_recipe
from meshrec.train.ranks import Ranks
from meshrec.train.recipe_files import resolve
from meshrec.train.run_folder import RUNS
from meshrec.train.tuning import read_space, train_seeds, tune, with_options


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Search recipe options with Optuna, and measure how the best trial's metrics vary with the seed.

    Trials are stored in an SQLite file; the same command continues the search.
    Recipe options, such as --training.epochs 2, apply to all trials:
    `meshrec tune RECIPE --help` lists them.
    """

    trials: int = 20
    """Number of trials, including trials of earlier calls; 0: none, only --seeds."""
    space: Words = ()
    """Options to search, such as tables.lr=1e-4..1e-1:log model.embedding_dim=8,16,32; none: both learning
    rates, from a tenth to ten times the recipe's values.
    """
    seeds: int | None = None
    """Number of seeds with which to train the best options afterwards, for mean and standard deviation."""
    seed: int = 0
    """Seed for the search."""
    storage: Path | None = None
    """SQLite file for the trials; none: RECIPE-tune.db in the folder with all runs."""
    nproc: int = 1
    """Number of ranks on this machine, which train all trials together."""
    device: str | None = None
    """Device: cpu or cuda; none: cuda if torch sees a GPU."""
    runs: Path = RUNS
    """Folder with all runs."""


_SUMMARY = "Search options of this recipe; those given here hold for all trials."


def main(arguments: Sequence[str]) -> int:
    source, words = split_recipe(arguments)
    if source is None:
        parse_arguments(TuneOptions, words, program="meshrec tune RECIPE")
        raise UsageError(
            "tune: RECIPE is missing, as for meshrec train. `meshrec tune --help` lists options."
        )
    recipe = resolve(source)
    if any(word in HELP for word in words):
        print(recipe_help(f"meshrec tune {source}", recipe, TuneOptions, summary=_SUMMARY))
        return 0
    # Recipe options given here are repeated in the command printed at the end.
    _, of_recipe = parse_known(TuneOptions, words, program="meshrec tune")
    options, recipe = parse(source, words, recipe, kind=TuneOptions, command="tune")
    if options.trials < 0 or (options.trials == 0 and options.seeds is None):
        raise ValueError(f"--trials is {options.trials}: nothing would be done. Take 1 or more, or --seeds.")
    space = read_space(options.space, recipe)
    recipe.check(options.nproc)

    def work(ranks: Ranks) -> None:
        """Run the trials, and then train with several seeds, both if requested. Rank 0 prints the results."""
        tell = print if ranks.is_first else _silent
        best: dict[str, object] = {}
        if options.trials:
            storage = options.storage or options.runs / f"{recipe.name}-tune.db"
            # The folder with all runs may not exist yet.
            storage.parent.mkdir(parents=True, exist_ok=True)
            result = tune(
                recipe, ranks, space, trials=options.trials, storage=storage, seed=options.seed, tell=tell
            )
            best = result.values
            tell(f"best of {result.num_trials}: {result.worth:.5f}, trial {result.trial} of {storage}")
            given = [*map(shlex.quote, of_recipe), *(f"--{name} {value}" for name, value in best.items())]
            tell(f"to train it: meshrec train {source} {' '.join(given)}")
        if options.seeds is not None:
            for name, spread in train_seeds(
                with_options(recipe, best), ranks, options.seeds, tell=tell
            ).items():
                tell(f"{name.replace('_', ' '):20} {spread.mean:.5f} +- {spread.deviation:.5f}")

    return on_ranks("tune", arguments, work, nproc=options.nproc, device=options.device)


def _silent(_: str) -> None:
    """Print nothing, on ranks other than 0."""
