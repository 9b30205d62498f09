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

from meshrec.cli.arguments import HELP, UsageError
from meshrec.cli.arguments import parse as parse_arguments
from meshrec.cli.recipe_help import recipe_help
from meshrec.cli.unread import check_reader
from meshrec.data.faults import needs
from meshrec.data.locations import is_address
from meshrec.data.nearest import did_you_mean
from meshrec.lazy import uncollected
from meshrec.optim.optimizers import SPECS, OptimizerSpec
from meshrec.runs.job import BEGAN_VARIABLE, GOES_ON, RUN_VARIABLE, Job
from meshrec.runs.lock import RunLock, claim_run
from meshrec.runs.saved_recipe import changes, load_recipe
from meshrec.train.launch import RANK_TIMEOUT, launch
from meshrec.train.ranks import choose_device, launched
from meshrec.train.recipe import Recipe
from meshrec.train.recipes import RECIPES, resolve
from meshrec.train.run_folder import CONFIG, RUNS, SUMMARY, RunFolder, drop_unstarted, new_run
from meshrec.train.trackers import find_trackers
from meshrec.train.yaml_recipes import SUFFIXES


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train a recipe: plan, shard, train and evaluate. The run folder holds everything to look at.

    RECIPE is a name, path/to/file.py:function or package.module:function.
    `meshrec train RECIPE --help` lists its options.

    `meshrec train --resume --name RUN` continues a run; options given then are changes to it.

    Several hosts: torchrun ... -m meshrec train RECIPE, or `meshrec launch`.
    """

    recipe: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")]
    """Recipe to train; `meshrec train --help` lists the names."""
    nproc: int | None = None
    """Number of ranks on this machine; if none, 1, or as many as the resumed run had."""
    name: str | None = None
    """Name of the run; if none, the recipe's name with the next free number."""
    runs: Path = RUNS
    """Folder of all run folders."""
    out: str | None = None
    """Storage of the run that all hosts reach: a mounted folder, which takes the place of --runs, or the
    address of an object store for the checkpoints, such as s3://bucket/runs.
    """
    no_checkpoints: bool = False
    """Save no checkpoint, not even at the end: for tries on hosts that share no storage."""
    device: str | None = None
    """cpu or cuda; if none, cuda where torch sees a GPU."""
    resume: bool = False
    """Continue a run from its last checkpoint; without --name, the recipe's newest run."""
    trust: bool = False
    """Execute the recipe's source that the resumed run names, even if another user trained the run."""
    quiet: bool = False
    """Print lines instead of a live display."""
    profile: bool = False
    """Trace a few steps for Perfetto (ui.perfetto.dev)."""
    table_optimizer: str | None = None
    """Name of another optimizer for the tables, at the recipe's learning rate; set its options with
    --tables.OPTION.
    """
    baselines: bool = False
    """Compare with baselines on the same data, and name the winner: global mean, item popularity, logistic
    regression, and LightGBM where it is installed.
    """
    track: str = ""
    """More observers: mlflow, wandb, or your own FILE.py:FUNCTION; several with commas."""
    max_restarts: int = 0
    """Number of times that all ranks are restarted when one fails."""
    on: Literal["ray"] | None = None
    """Train on a cluster of Ray instead of this machine; its address is in RAY_ADDRESS."""
    num_workers: int = 1
    """Number of Ray's workers, which are the ranks; only with --on ray."""
    min_workers: int | None = None
    """Smallest number of Ray's workers to continue with while others are missing; if none, all."""
    rank_timeout: float = RANK_TIMEOUT
    """Seconds to wait for a rank that does not answer during training."""


HELP_ALL = "--help-all"
_GOES_ON_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again
_SUMMARY = "Train this recipe; its run folder holds everything to look at."


class _Asked(NamedTuple):
    """The recipe that the arguments name, the other arguments, and the run to resume, if any."""

    source: str
    recipe: Recipe
    rest: list[str]
    resumed: RunFolder | None


def main(arguments: Sequence[str]) -> int:
    """Parse, then launch ranks or train as one; return the exit code."""
    with ExitStack() as locks:  # held on the run's folder until the process ends
        return _main(arguments, locks)


def _main(arguments: Sequence[str], locks: ExitStack) -> int:
    began = os.environ.get(BEGAN_VARIABLE, str(time.time()))
    at = recipe_at(arguments)
    if at is None and "--resume" not in arguments:
        return _help(arguments)
    asked = _asked(arguments, at, locks)
    if any(word in HELP for word in asked.rest):
        print(recipe_help(f"meshrec train {asked.source}", asked.recipe, TrainOptions, summary=_SUMMARY))
        return 0
    if HELP_ALL in asked.rest:
        asked = asked._replace(rest=[HELP[1]])
    options, recipe = parse([asked.source, *_with_folder(asked)], asked.recipe)
    resumed, job = asked.resumed, _job(asked, options, recipe)
    if resumed is not None and _is_over(resumed, job):
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
    find_trackers(options.track)
    if options.baselines:
        needs("scipy.optimize", "train")  # fail now, not at the end of the run
    device = choose_device(options.device)
    folder = resumed or locks.enter_context(claim_run(options.name, recipe.name, _runs(options)))
    if nproc == 1 and options.max_restarts == 0:
        job = dataclasses.replace(job, folder=folder)
        return _code(_train(job, quiet=options.quiet))
    for rank in range(nproc):
        folder.error(rank).unlink(missing_ok=True)
    ended = launch(
        ["train", *([] if at is None else [asked.source]), *asked.rest, "--device", device],
        num_ranks=nproc,
        folder=folder,
        max_restarts=options.max_restarts,
        environment={RUN_VARIABLE: str(folder.path), BEGAN_VARIABLE: began},
        rank_timeout=options.rank_timeout,
    )
    if ended.error is not None:
        check_reader(ended.error)
        return _tell_failure(folder, ended.error, ended.code)
    return ended.code or (1 if folder.state().name == "failed" else 0)


def _with_folder(asked: _Asked) -> list[str]:
    """Return the arguments with ``--data DIR`` as the path of a recipe whose data is one folder."""
    if not hasattr(asked.recipe.data, "path"):
        return asked.rest
    return [re.sub("^--data(?==|$)", "--data.path", word) for word in asked.rest]


def _job(asked: _Asked, options: TrainOptions, recipe: Recipe) -> Job:
    resumed = asked.resumed
    return Job(
        recipe=recipe,
        source=asked.source,
        name=options.name if resumed is None else resumed.path.name,
        runs=_runs(options),
        device=options.device,
        resume=options.resume,
        changes=[] if resumed is None else changes(asked.recipe, recipe),
        profile=options.profile,
        baselines=options.baselines,
        track=options.track,
        rank_timeout=options.rank_timeout,
        keep=not options.no_checkpoints,
        store=options.out if options.out is not None and is_address(options.out) else None,
    )


def _num_ranks(options: TrainOptions, resumed: RunFolder | None) -> int:
    """Return the number of ranks to start: as asked, as before, or 1."""
    nproc = options.nproc
    if nproc is None:
        nproc = 1 if resumed is None else int((resumed.read_json(CONFIG) or {}).get("ranks", 1))
    if nproc < 1:
        raise ValueError(f"--nproc is {nproc}; it must be at least 1.")
    if options.rank_timeout <= 0:
        raise ValueError(f"--rank-timeout is {options.rank_timeout}; it must be above 0 seconds.")
    return nproc


def _runs(options: TrainOptions) -> Path:
    if options.out is None or is_address(options.out):
        return options.runs
    if options.runs != RUNS:
        raise ValueError(
            f"--out {options.out} and --runs {options.runs} both name the place of runs; give one."
        )
    return Path(options.out)


def _is_over(run: RunFolder, job: Job) -> bool:
    """Return whether a run is finished, and no option lets it train longer.

    Ranks that our launcher started never stop here: the launcher has asked before it started them.
    """
    longer = {"training.epochs", "training.max_steps", "training.patience"}
    asks_more = any(change.name in longer for change in job.changes)
    return RUN_VARIABLE not in os.environ and run.state().name == "finished" and not asks_more


def recipe_at(arguments: Sequence[str], kind: type = TrainOptions) -> int | None:
    """Return the index of the recipe among the arguments. Options may stand before and after it.

    The word after an option of a recipe may be the option's value. It counts as the recipe only if it looks
    like one.

    Args:
        arguments: The words of the command line.
        kind: The dataclass of the command's own options.
    """
    fields = dataclasses.fields(kind)
    valued = {each.name for each in fields if each.type not in (bool, "bool")} - {"recipe"}
    candidates = []
    taken = False  # as a value by the option before
    unsure = False
    for number, word in enumerate(arguments):
        if word.startswith("-"):
            name, equals, _ = word.lstrip("-").replace("-", "_").partition("=")
            taken = name in valued and not equals
            unsure = "." in name and not equals
            continue
        if not taken:
            candidates.append((number, unsure))
        taken = unsure = False
    for doubt in (False, True):
        for number, unsure in candidates:
            word = arguments[number]
            if unsure is doubt and (
                word in RECIPES or word.endswith(SUFFIXES) or (":" in word and "=" not in word)
            ):
                return number
    return next((number for number, unsure in candidates if not unsure), None)


def _asked(arguments: Sequence[str], at: int | None, locks: ExitStack) -> _Asked:
    rest = [word for number, word in enumerate(arguments) if number != at]
    source = None if at is None else arguments[at]
    if "--resume" not in rest:
        assert source is not None
        return _Asked(source, resolve(source), rest, None)
    name, out = _value(rest, "--name"), _value(rest, "--out")
    is_store = out is not None and is_address(out)
    runs = Path((None if is_store else out) or _value(rest, "--runs") or RUNS)
    if is_store and out is not None and name is not None:
        from meshrec.checkpoint.stored import ObjectStore
        from meshrec.train.stored_run import download_run

        download_run(name, runs, ObjectStore(out))
    made = os.environ.get(RUN_VARIABLE)
    if made:
        folder = RunFolder(Path(made))
    elif source is None and name is None:
        raise ValueError("--resume: name the run to resume (--name RUN), or its recipe.")
    else:
        folder = new_run(name, resolve(source).name if source else "", runs, resume=True)
        if not launched():  # rank 0 of another launcher locks it
            locks.enter_context(RunLock(folder))
    folder = dataclasses.replace(folder, is_trusted="--trust" in rest)
    recipe = load_recipe(folder, source)
    return _Asked(source or str(folder.read_json(CONFIG)["source"]), recipe, rest, folder)


def _value(arguments: Sequence[str], option: str) -> str | None:
    for number, word in enumerate(arguments):
        if word == option and number + 1 < len(arguments):
            return arguments[number + 1]
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None


def _as_rank(job: Job, *, quiet: bool) -> int:
    ours = os.environ.get(RUN_VARIABLE)
    try:
        summary = _train(job, quiet=quiet)
    except Exception:
        if ours and RunFolder(Path(ours)).error(int(os.environ["RANK"])).is_file():
            return 1  # our launcher reports it once, for all ranks
        raise
    return 0 if ours else _code(summary)


def _train(job: Job, *, quiet: bool) -> dict[str, Any]:
    """Train as one rank. Only ranks import this: it takes longer than all that their launcher needs."""
    with uncollected():
        from meshrec.cli.screen import make_screen
        from meshrec.runs.worker import work
    return work(job, make_screen(quiet=quiet))


def _code(summary: dict[str, Any]) -> int:
    if summary.get(GOES_ON):
        return _GOES_ON_CODE
    return 1 if summary["state"] == "failed" else 0


def _tell_failure(folder: RunFolder, error: str, code: int) -> int:
    from meshrec.runs.worker import commands, record_failure

    sys.stderr.write(f"meshrec: {error}\n")
    record_failure(folder, error.splitlines()[0])
    if not (folder.path / CONFIG).exists():
        if str(folder.path) not in error:  # keep the folder that the error points to
            drop_unstarted(folder)
        return code
    if folder.has_checkpoint:
        sys.stderr.write(f"to continue from the last checkpoint: {commands(folder)['resume']}\n")
    else:
        sys.stderr.write(
            "no checkpoint was saved: train again (--training.checkpoint-every saves during training)\n"
        )
    return code


def parse(
    arguments: Sequence[str], recipe: Recipe, kind: Any = TrainOptions, *, command: str = "train"
) -> tuple[Any, Recipe]:
    """Read the command's options, and return the recipe with the values that they override."""
    name = _value(arguments, "--table-optimizer")
    if name is not None:
        recipe = dataclasses.replace(recipe, tables=table_optimizer(name, recipe.tables))
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
    parsed = parse_arguments(
        joined, arguments, program=f"meshrec {command} {arguments[0]}", description=inspect.getdoc(kind)
    )
    return parsed.options, dataclasses.replace(recipe, **{name: getattr(parsed, name) for name in parts})


def table_optimizer(name: str, now: OptimizerSpec) -> OptimizerSpec:
    """Return the named optimizer with the learning rate of ``now``. Case and dashes do not matter.

    Raises:
        ValueError: There is no such optimizer.
    """
    kinds = {kind.__name__: kind for kind in SPECS}
    wanted = name.replace("-", "").replace("_", "").lower()
    for known, kind in kinds.items():
        if known.lower() == wanted:
            return now if type(now) is kind else kind(lr=now.lr)
    raise ValueError(
        f"--table-optimizer {name}: there is no such optimizer; take one of {', '.join(kinds)}."
        f"{did_you_mean(name, kinds)}"
    )


def _help(arguments: Sequence[str]) -> int:
    """Print the help that lists all recipes.

    Raises:
        UsageError: The recipe is missing, and help was not requested.
    """
    names = "\n".join(
        f"  {name}: {(function.__doc__ or '').splitlines()[0]}" for name, function in RECIPES.items()
    )
    asked_for = any(word in (*HELP, HELP_ALL) for word in arguments)
    if not asked_for and arguments:
        raise UsageError(
            f"train {' '.join(arguments)}: which recipe? One of {', '.join(RECIPES)}, or your own: "
            "path/to/file.py:function."
        )
    try:
        parse_arguments(
            TrainOptions,
            [HELP[1]],
            program="meshrec train",
            description=f"{inspect.getdoc(TrainOptions)}\n\nRecipes:\n{names}",
        )
    except SystemExit:
        return 0 if asked_for else 2
    raise AssertionError("tyro prints a help and exits")
