"""``meshrec train``: train a recipe on this machine, or as one rank of another launcher."""

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
from meshrec.cli.recipe_help import recipe_help
from meshrec.cli.unread import raise_if_unread
from meshrec.comms.launchers import launched
from meshrec.data.faults import needs
from meshrec.data.locations import is_address
from meshrec.data.nearest import did_you_mean
from meshrec.lazy import without_gc
from meshrec.optim.optimizers import SPECS, OptimizerSpec
from meshrec.runs.job import RESTART_REQUESTED, RUN_VARIABLE, START_TIME_VARIABLE, Job
from meshrec.runs.lock import RunLock, claim_run
from meshrec.runs.saved_recipe import changed_options, load_recipe
from meshrec.train.launch import RANK_TIMEOUT, launch
from meshrec.train.ranks import choose_device
from meshrec.train.recipe import Recipe
from meshrec.train.recipes import RECIPES, full_name, resolve
from meshrec.train.run_folder import CONFIG, RUNS, SUMMARY, RunFolder, new_run
from meshrec.train.trackers import find_trackers


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train a recipe: plan, shard, train and evaluate. All results are in the run folder.

    RECIPE is a name, path/to/file.py:function or package.module:function; path/to/file.py with one recipe.
    `meshrec train RECIPE --help` lists its options.

    `meshrec train --resume --name RUN` continues a run; options given then are changes to it.

    Several hosts: torchrun ... -m meshrec train RECIPE, or `meshrec launch`.
    """

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
    no_checkpoints: bool = False
    """Save no checkpoints, not even at the end, for trials on hosts without shared storage."""
    device: str | None = None
    """cpu or cuda; none: cuda if torch sees a GPU."""
    resume: bool = False
    """Continue a run from the last checkpoint; without --name, the recipe's newest run."""
    trust: bool = False
    """Execute the recipe source of the resumed run, even if another user trained the run."""
    quiet: bool = False
    """Print lines instead of a live display."""
    profile: bool = False
    """Trace a few steps for Perfetto (ui.perfetto.dev)."""
    table_optimizer: str | None = None
    """Another optimizer for the tables, at the recipe's learning rate; set its options with --tables.OPTION.
    """
    baselines: bool = False
    """Compare with baselines on the same data: global mean, item popularity, logistic regression, and
    LightGBM if installed. A resumed run keeps this option.
    """
    final: Literal["all"] | None = None
    """all: after the run, refit on all rows, validation and test rows included, with the number of passes
    that validation selected. `meshrec export` uses the refit; metrics are those of the first fit. With
    --resume, also for a finished run. A resumed run keeps this option.
    """
    track: str = ""
    """More observers, separated by commas: mlflow, wandb, or your own FILE.py:FUNCTION."""
    max_restarts: int = 0
    """Maximum number of restarts of all ranks after a failure."""
    on: Literal["ray"] | None = None
    """Train on a Ray cluster (at RAY_ADDRESS) instead of this machine."""
    num_workers: int = 1
    """Number of Ray workers, which are the ranks; only with --on ray."""
    min_workers: int | None = None
    """Minimum number of Ray workers with which to continue if others fail; none: all."""
    rank_timeout: float = RANK_TIMEOUT
    """Seconds to wait for a rank that does not answer during training."""


HELP_ALL = "--help-all"
_RESTART_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: an elastic launcher starts the ranks again
_SUMMARY = "Train this recipe; its run folder holds everything to look at."


class _Command(NamedTuple):
    """Recipe of a command line, and the run that it resumes, if any."""

    source: str
    """Full name of the recipe."""
    recipe: Recipe
    words: list[str]
    """The arguments without the recipe."""
    resumed: RunFolder | None


def main(arguments: Sequence[str]) -> int:
    """Parse, then launch ranks or train as one; return the exit code."""
    with ExitStack() as locks:  # held on the run's folder until the process ends
        return _main(arguments, locks)


def _main(arguments: Sequence[str], locks: ExitStack) -> int:
    """Run the command; locks on the run folder are entered into ``locks``."""
    began = os.environ.get(START_TIME_VARIABLE, str(time.time()))
    name, words = split_recipe(arguments)
    # Options of the recipe are unknown until it is resolved, which takes some of the command's options.
    first, _ = parse_known(TrainOptions, words, program="meshrec train")
    if name is None and not first.resume:
        return _help(words)
    command = _find_recipe(name, first, words, locks)
    if any(word in HELP for word in words):
        print(recipe_help(f"meshrec train {command.source}", command.recipe, TrainOptions, summary=_SUMMARY))
        return 0
    options, recipe = parse(command.source, _with_folder(command), command.recipe, first.table_optimizer)
    resumed, job = command.resumed, _make_job(command, options, recipe)
    if resumed is not None and _is_complete(resumed, job):
        # Under another launcher, every rank comes here.
        if os.environ.get("RANK", "0") == "0":
            step = (resumed.read_json(SUMMARY) or {}).get("step")
            print(f"{resumed.path} is finished, at step {step}: give more --training.epochs to train longer.")
        return 0
    if launched():
        return _as_rank(job, quiet=options.quiet)
    if options.on == "ray":
        from meshrec.cli.on_ray import train_on_ray

        locks.close()  # the first worker is another process, and locks the run's folder itself
        return train_on_ray(job, options.num_workers, options.min_workers, options.max_restarts)
    nproc = _num_ranks(options, resumed)
    recipe.check(nproc)
    if job.final is not None:
        from meshrec.runs.refit import check_refit

        check_refit(job)
    # Before the run has a folder: a wrong name must not leave one behind.
    find_trackers(options.track)
    if job.baselines:
        needs("scipy.optimize", "train")  # fail now, not at the end of the run
    device = choose_device(options.device)
    folder = resumed or locks.enter_context(claim_run(options.name, recipe.name, _runs_folder(options)))
    # Without a launcher, a single rank starts sooner: no second process has to import torch.
    if nproc == 1 and options.max_restarts == 0:
        job = dataclasses.replace(job, folder=folder)
        return _exit_code(_train_rank(job, quiet=options.quiet))
    for rank in range(nproc):
        folder.discard(folder.error(rank))
    ended = launch(
        ["train", *([] if name is None else [command.source]), *words, "--device", device],
        num_ranks=nproc,
        folder=folder,
        max_restarts=options.max_restarts,
        environment={RUN_VARIABLE: str(folder.path), START_TIME_VARIABLE: began},
        rank_timeout=options.rank_timeout,
    )
    if ended.error is not None:
        raise_if_unread(ended.error)
        return _report_failure(folder, ended.error, ended.code)
    return ended.code or (1 if folder.state().name == "failed" else 0)


def _with_folder(command: _Command) -> list[str]:
    """Return the arguments, with ``--data DIR`` replaced by ``--data.path DIR`` if the data is one folder."""
    if not hasattr(command.recipe.data, "path"):
        return command.words
    return [re.sub("^--data(?==|$)", "--data.path", word) for word in command.words]


def _make_job(command: _Command, options: TrainOptions, recipe: Recipe) -> Job:
    """Return the run options for the ranks."""
    resumed = command.resumed
    return Job(
        recipe=recipe,
        source=command.source,
        name=options.name if resumed is None else resumed.path.name,
        runs=_runs_folder(options),
        device=options.device,
        resume=options.resume,
        changes=[] if resumed is None else changed_options(command.recipe, recipe),
        profile=options.profile,
        baselines=options.baselines or bool(_read_config(resumed).get("baselines")),
        final=options.final or _read_config(resumed).get("final"),
        track=options.track,
        rank_timeout=options.rank_timeout,
        keep=not options.no_checkpoints,
        store=options.out if options.out is not None and is_address(options.out) else None,
    )


def _num_ranks(options: TrainOptions, resumed: RunFolder | None) -> int:
    """Return the number of ranks to start: --nproc, or that of the resumed run, or 1."""
    nproc = options.nproc
    if nproc is None:
        nproc = int(_read_config(resumed).get("ranks", 1))
    if nproc < 1:
        raise ValueError(f"--nproc is {nproc}; it must be at least 1.")
    if options.rank_timeout <= 0:
        raise ValueError(f"--rank-timeout is {options.rank_timeout}; it must be above 0 seconds.")
    return nproc


def _read_config(run: RunFolder | None) -> dict[str, Any]:
    """Return the configuration of the resumed run; empty without one."""
    return {} if run is None else run.read_json(CONFIG) or {}


def _runs_folder(options: TrainOptions) -> Path:
    """Return the folder of all runs: --out if it is a folder, else --runs."""
    if options.out is None or is_address(options.out):
        return options.runs
    if options.runs != RUNS:
        raise ValueError(
            f"--out {options.out} and --runs {options.runs} both name the place of runs; give one."
        )
    return Path(options.out)


def _is_complete(run: RunFolder, job: Job) -> bool:
    """Return whether a run is finished, and no option asks for more training.

    Ranks that our launcher started never stop here: the launcher has asked before it started them.
    """
    longer = {f"training.{name}" for name in ("epochs", "max_steps", "patience", "chance_patience")}
    asks_more = any(change.name in longer for change in job.changes)
    asks_more = asks_more or (job.final is not None and "final" not in (run.read_json(SUMMARY) or {}))
    return RUN_VARIABLE not in os.environ and run.state().name == "finished" and not asks_more


def split_recipe(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the recipe, which comes before all options, and the other arguments."""
    if not arguments or arguments[0].startswith("-"):
        return None, list(arguments)
    return arguments[0], list(arguments[1:])


def _find_recipe(name: str | None, options: TrainOptions, words: list[str], locks: ExitStack) -> _Command:
    """Return the recipe of the command line, or of the run that it resumes. Locks that run's folder."""
    source = None if name is None else full_name(name)
    if not options.resume:
        assert source is not None
        return _Command(source, resolve(source), words, None)
    out = options.out
    is_store = out is not None and is_address(out)
    runs = options.runs if is_store or out is None else Path(out)
    if is_store and out is not None and options.name is not None:
        from meshrec.checkpoint.stored import ObjectStore
        from meshrec.train.stored_run import download_run

        download_run(options.name, runs, ObjectStore(out))
    launcher_folder = os.environ.get(RUN_VARIABLE)
    if launcher_folder:
        folder = RunFolder(Path(launcher_folder))
    elif source is None and options.name is None:
        raise ValueError("--resume: name the run to resume (--name RUN), or its recipe.")
    else:
        folder = new_run(options.name, resolve(source).name if source else "", runs, resume=True)
        if not launched():  # rank 0 of another launcher locks it
            locks.enter_context(RunLock(folder))
    folder = dataclasses.replace(folder, is_trusted=options.trust)
    recipe = load_recipe(folder, source)
    return _Command(source or str(folder.read_json(CONFIG)["source"]), recipe, words, folder)


def _as_rank(job: Job, *, quiet: bool) -> int:
    """Train as a rank that a launcher started; return the exit code."""
    ours = os.environ.get(RUN_VARIABLE)
    try:
        summary = _train_rank(job, quiet=quiet)
    except Exception:
        if ours and RunFolder(Path(ours)).error(int(os.environ["RANK"])).is_file():
            return 1  # our launcher reports it once, for all ranks
        raise
    return 0 if ours else _exit_code(summary)


def _train_rank(job: Job, *, quiet: bool) -> dict[str, Any]:
    """Train as one rank, and return the summary. Imports are here: the launcher does not need them."""
    with without_gc():
        from meshrec.cli.screen import make_screen
        from meshrec.runs.worker import run_rank
    return run_rank(job, make_screen(quiet=quiet))


def _exit_code(summary: dict[str, Any]) -> int:
    """Return the exit code for a run's summary."""
    if summary.get(RESTART_REQUESTED):
        return _RESTART_EXIT_CODE
    return 1 if summary["state"] == "failed" else 0


def _report_failure(folder: RunFolder, error: str, code: int) -> int:
    """Print an error and the command to continue, record the failure, and return ``code``."""
    from meshrec.runs.removing import remove_unstarted
    from meshrec.runs.worker import next_commands, record_failed_run

    sys.stderr.write(f"meshrec: {error}\n")
    record_failed_run(folder, error.splitlines()[0])
    if not (folder.path / CONFIG).exists():
        if str(folder.path) not in error:  # keep the folder that the error points to
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
) -> tuple[Any, Recipe]:
    """Parse the options of command and recipe; return the former, and the recipe with the latter applied.

    Args:
        source: Name of the recipe.
        words: The arguments without the recipe.
        recipe: The recipe.
        optimizer: Name of another optimizer for the tables, whose options then take its place.
        kind: The dataclass of the command's own options.
        command: Name of the command, for its help.
    """
    if optimizer is not None:
        recipe = dataclasses.replace(recipe, tables=table_optimizer(optimizer, recipe.tables))
    parts = {
        field.name: getattr(recipe, field.name)
        for field in dataclasses.fields(recipe)
        if field.name != "name"
    }
    joined: Any = dataclasses.make_dataclass(
        "Train",
        [
            ("options", Annotated[kind, tyro.conf.arg(name="")]),
            *((name, type(part), dataclasses.field(default=part)) for name, part in parts.items()),
        ],
        frozen=True,
        kw_only=True,
    )
    words = [HELP[1] if word == HELP_ALL else word for word in words]
    parsed = parse_arguments(
        joined, words, program=f"meshrec {command} {source}", description=inspect.getdoc(kind)
    )
    return parsed.options, dataclasses.replace(recipe, **{name: getattr(parsed, name) for name in parts})


def table_optimizer(name: str, now: OptimizerSpec) -> OptimizerSpec:
    """Return the named optimizer with the learning rate of ``now``. Case and dashes do not matter.

    Raises:
        ValueError: The optimizer does not exist.
    """
    kinds = {kind.__name__: kind for kind in SPECS}
    normalized = name.replace("-", "").replace("_", "").lower()
    for kind_name, kind in kinds.items():
        if kind_name.lower() == normalized:
            return now if type(now) is kind else kind(lr=now.lr)
    raise ValueError(
        f"--table-optimizer {name}: there is no such optimizer; take one of {', '.join(kinds)}."
        f"{did_you_mean(name, kinds)}"
    )


def _help(words: Sequence[str]) -> int:
    """Print the help that lists all recipes.

    Raises:
        UsageError: There are arguments, and none of them requests help.
    """
    names = "\n".join(
        f"  {name}: {(function.__doc__ or '').splitlines()[0]}" for name, function in RECIPES.items()
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
    except SystemExit:
        return 0 if wants_help else 2
    raise AssertionError("tyro prints a help and exits")
