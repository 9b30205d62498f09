"""``meshrec train``: trains a recipe, on this machine or as one rank of a launcher's."""

import dataclasses
import inspect
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from meshrec.cli.arguments import parse as parse_arguments
from meshrec.cli.screen import make_screen
from meshrec.train.launch import launch
from meshrec.train.ranks import choose_device, launched
from meshrec.train.recipe import Recipe
from meshrec.train.recipes import RECIPES, resolve
from meshrec.train.run_folder import RUNS, RunFolder, new_run
from meshrec.train.worker import RUN_VARIABLE, Job, work


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Trains a recipe: plans, shards, trains, evaluates, and leaves a folder with all there is to see.

    RECIPE is a name, path/to/file.py:function or package.module:function. Its own options follow it:
    `meshrec train RECIPE --help` lists them. Several nodes: torchrun ... -m meshrec train RECIPE.
    """

    recipe: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")]
    """What to train; `meshrec train --help` lists the names."""
    nproc: int = 1
    """Ranks on this machine."""
    name: str | None = None
    """The run's name; if none, the recipe's with the next number."""
    runs: Path = RUNS
    """Where run folders are."""
    device: str | None = None
    """cpu or cuda; if none, cuda where there is one."""
    resume: bool = False
    """Go on with a run from its last checkpoint."""
    quiet: bool = False
    """Lines in place of a live display."""
    profile: bool = False
    """Trace a few steps for Perfetto (ui.perfetto.dev)."""
    baselines: bool = True
    """Judge the three baselines, too; the flag leaves them out."""
    max_restarts: int = 0
    """How often to start all ranks anew when one fails."""


def main(arguments: Sequence[str]) -> int:
    """Parses, launches or works; the exit code."""
    if not arguments or arguments[0].startswith("-"):
        _help(arguments)
        return 0 if arguments else 2
    recipe = resolve(arguments[0])
    options, recipe = parse(arguments, recipe)
    job = Job(
        recipe=recipe,
        name=options.name,
        runs=options.runs,
        device=options.device,
        resume=options.resume,
        profile=options.profile,
        baselines=options.baselines,
    )
    if launched():
        try:
            work(job, make_screen(quiet=options.quiet))
        except ValueError:
            made = os.environ.get(RUN_VARIABLE)
            if made and RunFolder(Path(made)).error(int(os.environ["RANK"])).is_file():
                return 1  # our launcher tells it once, for all ranks
            raise
        return 0
    if options.nproc < 1:
        raise ValueError(f"--nproc is {options.nproc}; it must be at least 1.")
    recipe.check(options.nproc)
    device = choose_device(options.device)
    if options.nproc == 1 and options.max_restarts == 0:
        work(job, make_screen(quiet=options.quiet))
        return 0
    folder = new_run(options.name, recipe.name, options.runs, resume=options.resume)
    ended = launch(
        ["train", *arguments, "--device", device],
        num_ranks=options.nproc,
        folder=folder,
        max_restarts=options.max_restarts,
        environment={RUN_VARIABLE: str(folder.path)},
    )
    if ended.error is not None:
        sys.stderr.write(f"meshrec: {ended.error}\n")
    return ended.code


def parse(arguments: Sequence[str], recipe: Recipe) -> tuple[TrainOptions, Recipe]:
    """The options, and the recipe with what they override."""
    parts = {
        field.name: getattr(recipe, field.name)
        for field in dataclasses.fields(recipe)
        if field.name != "name"
    }
    joined: Any = dataclasses.make_dataclass(
        "Train",
        [
            ("options", Annotated[TrainOptions, tyro.conf.arg(name="")]),
            *((name, type(part), dataclasses.field(default=part)) for name, part in parts.items()),
        ],
        frozen=True,
        kw_only=True,
    )
    parsed = parse_arguments(
        joined, arguments, program=f"meshrec train {arguments[0]}", description=inspect.getdoc(TrainOptions)
    )
    return parsed.options, dataclasses.replace(recipe, **{name: getattr(parsed, name) for name in parts})


def _help(arguments: Sequence[str]) -> None:
    names = "\n".join(
        f"  {name}: {(function.__doc__ or '').splitlines()[0]}" for name, function in RECIPES.items()
    )
    parse_arguments(
        TrainOptions,
        arguments or ["--help"],
        program="meshrec train",
        description=f"{inspect.getdoc(TrainOptions)}\n\nRecipes:\n{names}",
    )
