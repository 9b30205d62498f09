"""``meshrec train``: train a recipe on this machine, or as a rank under another launcher."""

import dataclasses
import inspect
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import tyro

from meshrec.cli.arguments import HELP, UsageError, parse_known
from meshrec.cli.arguments import parse as parse_arguments
from meshrec.cli.unread import raise_if_unread
from meshrec.comms.launchers import launched
from meshrec.data.faults import did_you_mean, needs
from meshrec.data.locations import is_address
from meshrec.lazy import without_gc
from meshrec.optim.optimizers import SPECS, OptimizerSpec
from meshrec.runs.job import RESTART_REQUESTED, RUN_VARIABLE, START_TIME_VARIABLE, Job
from meshrec.runs.lock import RunLock, claim_run
from meshrec.runs.saved_recipe import changed_options, load_recipe
from meshrec.train.launch import RANK_TIMEOUT, launch
from meshrec.train.ranks import choose_device
from meshrec.train.recipe import Recipe
from meshrec.train.recipe_files import full_name, resolve
from meshrec.train.run_folder import (
    CONFIG,
    RUNS,
    SUMMARY,
    RunFolder,
    find_run,
    new_run,
    reported_run,
)
from meshrec.train.trackers import find_trackers


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of commands that train a run."""

    nproc: int | None = None
    """Number of ranks on this machine; none: 1, or as in the resumed run."""
    name: str | None = None
    """Run name; none: the recipe's name with the next free number."""
    runs: Path = RUNS
    """Folder with all runs."""
    out: str | None = None
    """Run storage reachable by all hosts: a mounted folder, which replaces --runs, or an object store address
    for the checkpoints, such as s3://bucket/runs.
    """
    device: str | None = None
    """cpu or cuda; none: cuda if torch sees a GPU."""
    resume: bool = False
    """Continue a run from the last checkpoint; without --name, the recipe's newest run."""
    from_: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """Run from whose weights, optimizer state and vocabularies a new run starts."""
    trust: bool = False
    """Execute the recipe source of the resumed run, even if another user trained the run."""
    quiet: bool = False
    """Print lines instead of a live display."""
    profile: bool = False
    """Trace a few steps for Perfetto (ui.perfetto.dev)."""
    table_optimizer: str | None = None
    """Another optimizer for the tables, at the recipe's learning rate; set its options with --tables.OPTION.
    """
    track: str = ""
    """More observers, separated by commas: mlflow, wandb, or your own FILE.py:FUNCTION."""
    max_restarts: int = 0
    """Maximum number of restarts of all ranks after a failure."""
    rank_timeout: float = RANK_TIMEOUT
    """Seconds to wait for a rank that does not answer during training."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """Train a recipe: plan, shard, train and evaluate. All results are in the run folder.

    RECIPE is a name, path/to/file.py:function or package.module:function; path/to/file.py with one recipe.
    `meshrec train RECIPE --help` lists its options.

    `meshrec train --resume --name RUN` continues a run; options given then are changes to it.

    Several hosts: torchrun ... -m meshrec train RECIPE, or `meshrec launch`.
    """

    no_checkpoints: bool = False
    """Save no checkpoints, not even at the end, for trials on hosts without shared storage."""
    baselines: bool = False
    """Compare with baselines on the same data: global mean, item popularity, logistic regression, and
    LightGBM if installed. A resumed run keeps this option.
    """
    final: Literal["all"] | None = None
    """all: after the run, refit on all rows, validation and test rows included, with the number of passes
    that validation selected. `meshrec export` uses the refit; metrics are those of the first fit. With
    --resume, also for a finished run. A resumed run keeps this option.
    """
    on: Literal["ray"] | None = None
    """Train on a Ray cluster (at RAY_ADDRESS) instead of this machine."""
    num_workers: int = 1
    """Number of Ray workers, which are the ranks; only with --on ray."""
    min_workers: int | None = None
    """Minimum number of Ray workers with which to continue if others fail; none: all."""


HELP_ALL = "--help-all"
# EX_TEMPFAIL in sysexits.h. After this exit code, an elastic launcher starts the ranks again.
_RESTART_EXIT_CODE = 75
_SUMMARY = "Train this recipe; its run folder holds everything to look at."


class RecipeCommand(NamedTuple):
    """Recipe given on the command line, or by the run to resume.

    Attributes:
        source: full recipe name, as for `resolve`.
        recipe: the recipe, without changes by options.
        words: arguments after the recipe.
        resumed: run to resume; None for a new run.
    """

    source: str
    recipe: Recipe
    words: list[str]
    resumed: RunFolder | None


def main(arguments: Sequence[str]) -> int:
    """Start a run, or train as a rank of a run, and return the exit code."""
    # Locks on the run folder are held until the command ends.
    with ExitStack() as locks:
        return _main(arguments, locks)


def _main(arguments: Sequence[str], locks: ExitStack) -> int:
    """Run the command, and return the exit code."""
    name, words = split_recipe(arguments)
    # Parse twice: recipe options are unknown until the recipe is resolved, for which command options are
    # needed.
    first, _ = parse_known(TrainOptions, words, program="meshrec train")
    # Without a recipe, there must be a request for help.
    if name is None and not first.resume:
        return _help(words)
    command = find_recipe(name, first, words, locks)
    if any(word in HELP for word in words):
        from meshrec.cli.recipe_help import recipe_help

        print(recipe_help(f"meshrec train {command.source}", command.recipe, TrainOptions, summary=_SUMMARY))
        return 0
    options, recipe = parse(command.source, with_data_folder(command), command.recipe, first.table_optimizer)
    resumed, job = command.resumed, _make_job(command, options, recipe)
    if resumed is not None and read_config(resumed).get("stream") is not None:
        raise ValueError(f"{resumed.path} follows a stream. Continue it with `meshrec follow --resume`.")
    if resumed is not None and _is_complete(resumed, job):
        # Under another launcher, every rank comes here, but only rank 0 prints.
        if os.environ.get("RANK", "0") == "0":
            step = (resumed.read_json(SUMMARY) or {}).get("step")
            print(f"{resumed.path} is finished, at step {step}: give more --training.epochs to train longer.")
        return 0
    if launched():
        return as_rank(job, quiet=options.quiet)
    if options.on == "ray":
        from meshrec.cli.on_ray import train_on_ray

        # The first worker is another process, and locks the run folder itself.
        locks.close()
        return train_on_ray(job, options.num_workers, options.min_workers, options.max_restarts)
    if job.final is not None:
        from meshrec.runs.refit import check_refit

        job.recipe.check(_num_ranks(options, resumed))
        check_refit(job)
    if job.baselines:
        needs("scipy.optimize", "train")
    recipe_name = [] if name is None else [command.source]
    return run_here(["train", *recipe_name, *words], job, options, resumed, locks)


def run_here(
    arguments: Sequence[str], job: Job, options: RunOptions, resumed: RunFolder | None, locks: ExitStack
) -> int:
    """Train on this machine, and return the exit code.

    Args:
        arguments: command and arguments of every rank, if ranks are separate processes.
        job: recipe and run options.
        options: command options.
        resumed: run to resume, which is locked; None: a new run.
        locks: receives the lock on a new run folder.
    """
    nproc = _num_ranks(options, resumed)
    job.recipe.check(nproc)
    # Check names and packages now, because a run that fails must not leave a folder, or fail only at its end.
    find_trackers(options.track)
    device = choose_device(options.device)
    folder = resumed or locks.enter_context(claim_run(options.name, job.recipe.name, runs_folder(options)))
    # A single rank runs in this process, and starts sooner, because no second process must import torch.
    if nproc == 1 and options.max_restarts == 0:
        job = dataclasses.replace(job, folder=folder)
        return _exit_code(_train_rank(job, quiet=options.quiet))
    # Errors from an earlier start would be reported as errors of this start.
    for rank in range(nproc):
        folder.discard(folder.error(rank))
    began = os.environ.get(START_TIME_VARIABLE, str(time.time()))
    ended = launch(
        [*arguments, "--device", device],
        num_ranks=nproc,
        folder=folder,
        max_restarts=options.max_restarts,
        # The ranks find the folder by this variable, and do not lock it.
        environment={RUN_VARIABLE: str(folder.path), START_TIME_VARIABLE: began},
        rank_timeout=options.rank_timeout,
    )
    if ended.error is not None:
        raise_if_unread(ended.error)
        return _report_failure(folder, ended.error, ended.code)
    return ended.code or (1 if folder.state().name == "failed" else 0)


def with_data_folder(command: RecipeCommand) -> list[str]:
    """Return the arguments, with ``--data DIR`` replaced by ``--data.path DIR`` if the data is a folder."""
    if not hasattr(command.recipe.data, "path"):
        return command.words
    return [re.sub("^--data(?==|$)", "--data.path", word) for word in command.words]


def _make_job(command: RecipeCommand, options: TrainOptions, recipe: Recipe) -> Job:
    """Return the recipe and run options for the ranks; see `make_job`."""
    resumed = command.resumed
    return make_job(
        command,
        options,
        recipe,
        # A resumed run keeps its first start's baselines and refit, without naming them again.
        baselines=options.baselines or bool(read_config(resumed).get("baselines")),
        final=options.final or read_config(resumed).get("final"),
        keep=not options.no_checkpoints,
    )


def make_job(command: RecipeCommand, options: RunOptions, recipe: Recipe, **further: Any) -> Job:
    """Return the recipe and run options for the ranks.

    Args:
        command: recipe on the command line, and the run to resume.
        options: command options.
        recipe: recipe with changes by options.
        further: further arguments of `Job`.
    """
    resumed = command.resumed
    return Job(
        recipe=recipe,
        source=command.source,
        name=options.name if resumed is None else resumed.path.name,
        runs=runs_folder(options),
        device=options.device,
        resume=options.resume,
        changes=[] if resumed is None else changed_options(command.recipe, recipe),
        profile=options.profile,
        track=options.track,
        rank_timeout=options.rank_timeout,
        store=options.out if options.out is not None and is_address(options.out) else None,
        warm_start=find_warm_start(options, resumed),
        **further,
    )


def find_warm_start(options: RunOptions, resumed: RunFolder | None) -> RunFolder | None:
    """Return the run that provides the initial weights: --from, or that of the resumed run, if any."""
    earlier = read_config(resumed).get("warm_start")
    if options.from_ is None:
        return None if earlier is None else RunFolder(Path(earlier["folder"]))
    if resumed is not None and earlier is None:
        raise ValueError(
            f"--from {options.from_} with --resume: {resumed.path} has weights already. Leave --from out to "
            "resume, or start a new run with another --name."
        )
    return reported_run(find_run(options.from_, runs_folder(options)))


def _num_ranks(options: RunOptions, resumed: RunFolder | None) -> int:
    """Return the number of ranks to start: --nproc, or as in the resumed run, or 1."""
    nproc = options.nproc
    if nproc is None:
        nproc = int(read_config(resumed).get("ranks", 1))
    if nproc < 1:
        raise ValueError(f"--nproc is {nproc}; it must be at least 1.")
    if options.rank_timeout <= 0:
        raise ValueError(f"--rank-timeout is {options.rank_timeout}; it must be above 0 seconds.")
    return nproc


def read_config(run: RunFolder | None) -> dict[str, Any]:
    """Return the configuration of the run to resume, or an empty dict for a new run."""
    return {} if run is None else run.read_json(CONFIG) or {}


def runs_folder(options: RunOptions) -> Path:
    """Return the folder with all runs: --out if it is a folder, else --runs."""
    if options.out is None or is_address(options.out):
        return options.runs
    if options.runs != RUNS:
        raise ValueError(
            f"--out {options.out} and --runs {options.runs} both name the place of runs; give one."
        )
    return Path(options.out)


def _is_complete(run: RunFolder, job: Job) -> bool:
    """Return whether a run is finished, and no option requests more training.

    On ranks started by MeshRec's launcher, return False, because the launcher has checked this before.
    """
    longer = {f"training.{name}" for name in ("epochs", "max_steps", "patience", "chance_patience")}
    asks_more = any(change.name in longer for change in job.changes)
    asks_more = asks_more or (job.final is not None and "final" not in (run.read_json(SUMMARY) or {}))
    return RUN_VARIABLE not in os.environ and run.state().name == "finished" and not asks_more


def split_recipe(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split arguments into the recipe name, which comes first, and all other arguments.

    The name is None if the first argument is an option.
    """
    if not arguments or arguments[0].startswith("-"):
        return None, list(arguments)
    return arguments[0], list(arguments[1:])


def find_recipe(name: str | None, options: RunOptions, words: list[str], locks: ExitStack) -> RecipeCommand:
    """Find the recipe given on the command line, or by the run to resume, whose folder is then locked.

    Args:
        name: recipe name on the command line; None: none was given.
        options: command options.
        words: arguments after the recipe.
        locks: receives the lock on the folder of the run to resume.

    Raises:
        ValueError: the recipe or the run does not exist, or the run is in use.
    """
    source = None if name is None else full_name(name)
    if not options.resume:
        assert source is not None
        return RecipeCommand(source, resolve(source), words, None)
    out = options.out
    is_store = out is not None and is_address(out)
    runs = options.runs if is_store or out is None else Path(out)
    if is_store and out is not None and options.name is not None:
        from meshrec.checkpoint.stored import ObjectStore
        from meshrec.train.stored_run import download_run

        # On another host, the run folder may exist only in the store.
        download_run(options.name, runs, ObjectStore(out))
    launcher_folder = os.environ.get(RUN_VARIABLE)
    if launcher_folder:
        folder = RunFolder(Path(launcher_folder))
    elif source is None and options.name is None:
        raise ValueError("--resume: name the run to resume (--name RUN), or its recipe.")
    else:
        folder = new_run(options.name, resolve(source).name if source else "", runs, resume=True)
        # Under another launcher, rank 0 locks the folder later.
        if not launched():
            locks.enter_context(RunLock(folder))
    folder = dataclasses.replace(folder, is_trusted=options.trust)
    recipe = load_recipe(folder, source)
    return RecipeCommand(source or str(folder.read_json(CONFIG)["source"]), recipe, words, folder)


def as_rank(job: Job, *, quiet: bool) -> int:
    """Train as a rank started by a launcher, and return the exit code."""
    # Run folder, if MeshRec's launcher has started this rank.
    launcher_folder = os.environ.get(RUN_VARIABLE)
    try:
        summary = _train_rank(job, quiet=quiet)
    except Exception:
        if launcher_folder and RunFolder(Path(launcher_folder)).error(int(os.environ["RANK"])).is_file():
            # MeshRec's launcher reports the error once for all ranks.
            return 1
        raise
    # MeshRec's launcher reads the state of the run from the folder.
    return 0 if launcher_folder else _exit_code(summary)


def _train_rank(job: Job, *, quiet: bool) -> dict[str, Any]:
    """Train as a rank, and return the summary of the run."""
    # Imported here, because the launcher does not need these modules.
    with without_gc():
        from meshrec.cli.screen import make_screen
        from meshrec.runs.worker import run_rank
    if job.stream is not None:
        from meshrec.runs.following import follow_rank

        return follow_rank(job, make_screen(quiet=quiet))
    return run_rank(job, make_screen(quiet=quiet))


def _exit_code(summary: dict[str, Any]) -> int:
    """Return the exit code for a run's summary: 75 requests a restart, 1 means failed, 0 otherwise."""
    if summary.get(RESTART_REQUESTED):
        return _RESTART_EXIT_CODE
    return 1 if summary["state"] == "failed" else 0


def _report_failure(folder: RunFolder, error: str, code: int) -> int:
    """Print an error and the command to continue, record the failure, and return ``code``.

    If the run has not started, the run folder is removed.
    """
    from meshrec.runs.removing import remove_unstarted
    from meshrec.runs.worker import next_commands, record_failed_run

    sys.stderr.write(f"meshrec: {error}\n")
    # Ranks leave this to MeshRec's launcher.
    record_failed_run(folder, error.splitlines()[0])
    if not (folder.path / CONFIG).exists():
        # Keep the folder if the error refers to a file in it.
        if str(folder.path) not in error:
            remove_unstarted(folder)
        return code
    if folder.has_checkpoint:
        sys.stderr.write(f"to continue from the last checkpoint: {next_commands(folder)['resume']}\n")
    else:
        sys.stderr.write(
            "no checkpoint was saved: train again (--training.checkpoint-every saves during training)\n"
        )
    return code


def parse(
    source: str,
    words: Sequence[str],
    recipe: Recipe,
    optimizer: str | None = None,
    kind: Any = TrainOptions,
    *,
    command: str = "train",
    default: Any = None,
) -> tuple[Any, Recipe]:
    """Parse command options and recipe options.

    Args:
        source: recipe name.
        words: arguments after the recipe.
        recipe: the recipe.
        optimizer: name of a table optimizer that replaces the recipe's, so that ``words`` can set its
            options; None: keep the recipe's table optimizer.
        kind: options class of the command.
        command: command name, for the help.
        default: values of the options that are not given; None: the defaults of the class.

    Returns:
        Command options, and the recipe with changes by recipe options.
    """
    if optimizer is not None:
        recipe = dataclasses.replace(recipe, tables=table_optimizer(optimizer, recipe.tables))
    parts = {
        field.name: getattr(recipe, field.name)
        for field in dataclasses.fields(recipe)
        if field.name != "name"
    }
    options: tuple[Any, ...] = ("options", Annotated[kind, tyro.conf.arg(name="")])
    if default is not None:
        options = (*options, dataclasses.field(default=default))
    # Both kinds of options must be fields of the same class, so that a single parser knows all options.
    joined: Any = dataclasses.make_dataclass(
        "Train",
        [
            options,
            *((name, type(part), dataclasses.field(default=part)) for name, part in parts.items()),
        ],
        frozen=True,
        kw_only=True,
    )
    # `--help-all` is an option of ours: tyro lists all options for `--help`.
    words = [HELP[1] if word == HELP_ALL else word for word in words]
    parsed = parse_arguments(
        joined, words, program=f"meshrec {command} {source}", description=inspect.getdoc(kind)
    )
    return parsed.options, dataclasses.replace(recipe, **{name: getattr(parsed, name) for name in parts})


def table_optimizer(name: str, now: OptimizerSpec) -> OptimizerSpec:
    """Return an optimizer by name, with the learning rate of the recipe's optimizer.

    Raises:
        ValueError: the optimizer does not exist.
    """
    kinds = {kind.__name__: kind for kind in SPECS}
    # So that adam, rowwise-adagrad and RowWiseAdagrad are all accepted.
    normalized = name.replace("-", "").replace("_", "").lower()
    for kind_name, kind in kinds.items():
        if kind_name.lower() == normalized:
            # The same kind keeps the recipe's other options, such as betas.
            return now if type(now) is kind else kind(lr=now.lr)
    raise ValueError(
        f"--table-optimizer {name}: there is no such optimizer; take one of {', '.join(kinds)}."
        f"{did_you_mean(name, kinds)}"
    )


def _help(words: Sequence[str]) -> int:
    """Print the help with all recipes, and return the exit code."""
    # Imported here, because these recipes need the modules of all models and sources.
    from meshrec.train.recipes import RECIPES

    names = "\n".join(
        f"  {name}: {(function.__doc__ or '').splitlines()[0].removeprefix('Return a recipe for ')}"
        for name, function in RECIPES.items()
    )
    wants_help = any(word in (*HELP, HELP_ALL) for word in words)
    if not wants_help and words:
        raise UsageError(
            f"train {' '.join(words)}: the recipe is missing. It comes first: one of {', '.join(RECIPES)}, "
            "or your own: path/to/file.py:function."
        )
    try:
        parse_arguments(
            TrainOptions,
            [HELP[1]],
            program="meshrec train RECIPE",
            description=f"{inspect.getdoc(TrainOptions)}\n\nRecipes:\n{names}",
        )
    # tyro ends the program after it has printed a help page.
    except SystemExit:
        return 0 if wants_help else 2
    raise AssertionError("tyro prints a help and exits")
