"""``meshrec tune``: search a recipe's options, and train with several seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from meshrec.cli.arguments import Words, parse
from meshrec.train.ranks import choose_device, join
from meshrec.train.recipes import resolve
from meshrec.train.run_folder import RUNS
from meshrec.train.tuning import read_space, seeds, tune, with_options


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Search options of a recipe with Optuna, and measure how much the best one's metrics vary with the seed.

    Trials are stored in an SQLite file; the same command continues them.
    """

    recipe: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")]
    """Recipe, as for meshrec train."""
    trials: int = 20
    """Number of trials of the study, earlier calls included; 0: none, for --seeds alone."""
    space: Words = ()
    """Options to search, such as tables.lr=1e-4..1e-1:log model.embedding_dim=8,16,32; if none, both learning
    rates, from a tenth to ten times the recipe's.
    """
    seeds: int | None = None
    """Number of seeds to train the best options with afterwards, for the mean and standard deviation."""
    seed: int = 0
    """Seed of the search."""
    storage: Path | None = None
    """SQLite file of the trials; if none, RECIPE-tune.db in the folder of runs."""
    device: str | None = None
    """Device: cpu or cuda; if none, cuda where torch sees a GPU."""
    runs: Path = RUNS
    """Folder of all run folders."""


def main(arguments: Sequence[str]) -> int:
    options = parse(TuneOptions, arguments, program="meshrec tune")
    recipe = resolve(options.recipe)
    if options.trials < 0 or (options.trials == 0 and options.seeds is None):
        raise ValueError(f"--trials is {options.trials}: nothing would be done. Take 1 or more, or --seeds.")
    space = read_space(options.space, recipe)
    ranks = join(choose_device(options.device))
    best: dict[str, object] = {}
    if options.trials:
        storage = options.storage or options.runs / f"{recipe.name}-tune.db"
        storage.parent.mkdir(parents=True, exist_ok=True)
        study = tune(
            recipe, ranks, space, trials=options.trials, storage=storage, seed=options.seed, tell=print
        )
        best = study.best_params
        number = study.best_trial.number
        print(f"best of {len(study.trials)}: {study.best_value:.5f}, trial {number} of {storage}")
        words = " ".join(f"--{name} {value}" for name, value in best.items())
        print(f"to train it: meshrec train {options.recipe} {words}")
    if options.seeds is not None:
        for name, spread in seeds(with_options(recipe, best), ranks, options.seeds, tell=print).items():
            print(f"{name.replace('_', ' '):20} {spread.mean:.5f} +- {spread.deviation:.5f}")
    return 0
