"""``meshrec tune``: searches a recipe's options, and trains with several seeds."""

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
    """Searches options of a recipe by Optuna, and says how far the best one's figures vary with the seed.

    The trials are kept in an SQLite file: the same command goes on with them.
    """

    recipe: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")]
    """A recipe, as for meshrec train."""
    trials: int = 20
    """Trials of the study, those of earlier calls included; 0: none, for --seeds alone."""
    space: Words = ()
    """Options to search, such as tables.lr=1e-4..1e-1:log model.embedding_dim=8,16,32. If none, both learning
    rates, from a tenth of the recipe's to ten times as much."""
    seeds: int | None = None
    """Afterwards, train the best so often, and give mean and deviation."""
    seed: int = 0
    """Of what is proposed."""
    storage: Path | None = None
    """The file of trials; if none, RECIPE-tune.db among the runs."""
    device: str | None = None
    """cpu or cuda; if none, cuda where there is one."""
    runs: Path = RUNS
    """Where run folders are."""


def main(arguments: Sequence[str]) -> int:
    """Parses and does it; the exit code."""
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
