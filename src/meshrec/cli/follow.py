"""``meshrec follow``: train a recipe on a stream of records, and never end."""

import inspect
import itertools
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

from meshrec.checkpoint.finding import read_hold
from meshrec.cli.arguments import HELP, UsageError, parse_known
from meshrec.cli.arguments import parse as parse_arguments
from meshrec.cli.train import (
    HELP_ALL,
    RunOptions,
    as_rank,
    find_recipe,
    make_job,
    parse,
    read_config,
    run_here,
    with_data_folder,
)
from meshrec.comms.joining import RESTARTS_VARIABLE
from meshrec.comms.launchers import launched
from meshrec.data.label_options import LabelOptions
from meshrec.data.locations import HIDDEN, is_address
from meshrec.runs.saved_recipe import restore_options
from meshrec.train.run_folder import CONFIG, RunFolder
from meshrec.train.stream_options import AfterRollBack, StreamOptions, check_roll_back

_Part = TypeVar("_Part", StreamOptions, LabelOptions)


@dataclass(frozen=True, kw_only=True)
class FollowOptions(RunOptions, StreamOptions, LabelOptions):
    """Train a recipe on a stream: on records that arrive while the model trains.

    SOURCE is a folder, or its address in a store, to which Parquet or Arrow files are added; or Redis streams
    or Kafka topics: redis://HOST:PORT/DB?stream=NAME,NAME or kafka://HOST:PORT/TOPIC,TOPIC. The recipe's data
    only fits the features, unless --from names a run, whose features and weights then continue.

    `meshrec follow --resume --name RUN` continues a run at the exact record, with its options. Ctrl-C stops
    it with a checkpoint.
    """

    actions: str | None = None
    """Later actions: a folder, Redis streams or Kafka topics, as for SOURCE. SOURCE then has impressions
    without the recipe's label: 1 if an action with the same --key comes within --window-seconds, else 0.
    Needs --time.
    """
    after_roll_back: AfterRollBack | None = None
    """With --resume, after an alarm has rolled the run back: reread trains the records between the checkpoint
    and the alarm again; skip continues after them.
    """


_SUMMARY = "Train this recipe on a stream, without an end."


def main(arguments: Sequence[str]) -> int:
    """Start a run, or train as a rank of a run, and return the exit code."""
    # Locks on the run folder are held until the command ends.
    with ExitStack() as locks:
        return _main(arguments, locks)


def _main(arguments: Sequence[str], locks: ExitStack) -> int:
    """Run the command, and return the exit code.

    Args:
        arguments: words after ``meshrec follow``.
        locks: receives the locks on the run folder.
    """
    name, source, words = _split(arguments)
    # Parse twice: recipe options are unknown until the recipe is resolved.
    first, _ = parse_known(FollowOptions, words, program="meshrec follow")
    if name is None and not first.resume:
        return _help(words)
    command = find_recipe(name, first, words, locks)
    if any(word in HELP for word in words):
        from meshrec.cli.recipe_help import recipe_help

        title = f"meshrec follow {command.source} SOURCE"
        print(recipe_help(title, command.recipe, FollowOptions, summary=_SUMMARY))
        return 0
    resumed = command.resumed
    options, recipe = parse(
        command.source,
        with_data_folder(command),
        command.recipe,
        first.table_optimizer,
        FollowOptions,
        command="follow",
        default=None if resumed is None else _saved_options(resumed),
    )
    after_roll_back = options.after_roll_back
    if os.environ.get(RESTARTS_VARIABLE, "0") != "0":
        # The first start has left the roll-back. The choice is not for a later one.
        after_roll_back = None
    elif not launched():
        hold = None if resumed is None else read_hold(resumed.path)
        check_roll_back("the run" if resumed is None else resumed.name, hold, after_roll_back)
    job = make_job(
        command,
        options,
        recipe,
        stream=_find_source(source, resumed),
        actions=_find_actions(options.actions, resumed),
        stream_options=_part(options, StreamOptions),
        label_options=_part(options, LabelOptions),
        after_roll_back=after_roll_back,
    )
    if launched():
        return as_rank(job, quiet=options.quiet)
    named = [] if name is None else [command.source, *([] if source is None else [source])]
    return run_here(["follow", *named, *words], job, options, resumed, locks)


def _split(arguments: Sequence[str]) -> tuple[str | None, str | None, list[str]]:
    """Split arguments into recipe and source, which come first, and all other arguments."""
    named = [*itertools.takewhile(lambda word: not word.startswith("-"), arguments[:2])]
    name, source = (*named, None, None)[:2]
    return name, source, [*arguments[len(named) :]]


def _part(options: FollowOptions, kind: type[_Part]) -> _Part:
    """Return the options that a base class of the command's options has."""
    return kind(**{field.name: getattr(options, field.name) for field in fields(kind)})


def _saved_options(run: RunFolder) -> FollowOptions:
    """Return the options with which a run followed its stream, as defaults.

    Raises:
        ValueError: the run does not follow a stream.
    """
    config = read_config(run)
    if config.get("stream_options") is None:
        raise ValueError(
            f"{run.path} does not follow a stream, so it has no position in one. Start a new run from its "
            f"weights: `meshrec follow RECIPE SOURCE --from {run.path.name}`."
        )
    where = f"{run.path / CONFIG}: options"
    stream = restore_options(StreamOptions(), config["stream_options"], where)
    # Runs of earlier versions have both in one entry.
    saved = config.get("label_options") or {**config["stream_options"], "type": LabelOptions.__name__}
    labels = restore_options(LabelOptions(), saved, where)
    return FollowOptions(**vars(stream), **vars(labels))


def _find_source(source: str | None, resumed: RunFolder | None) -> str:
    """Return the source on the command line, or of the run to resume; a folder as an absolute path.

    Raises:
        ValueError: the source is missing, the folder does not exist, or the run has no source with its
            secrets.
    """
    if source is not None:
        return _absolute(source)
    saved = _saved_source(resumed, "stream", "meshrec follow RECIPE SOURCE --resume")
    if saved is None:
        raise UsageError("follow: SOURCE is missing. It comes after the recipe: the folder to follow.")
    return saved


def _find_actions(actions: str | None, resumed: RunFolder | None) -> str | None:
    """Return the actions on the command line, or of the run to resume; None: there are none.

    Raises:
        ValueError: as for `_find_source`.
    """
    if actions is not None:
        return _absolute(actions)
    return _saved_source(resumed, "actions", "meshrec follow --resume --actions ADDRESS")


def _saved_source(resumed: RunFolder | None, name: str, command: str) -> str | None:
    """Return a source of the run to resume; None if it has none, or no run is resumed.

    Args:
        resumed: the run.
        name: entry of its configuration.
        command: command with which to give the source again, for the error.

    Raises:
        ValueError: the run does not have the secrets of the source.
    """
    saved: str | None = read_config(resumed).get(name)
    if saved is not None and HIDDEN in saved:
        assert resumed is not None
        raise ValueError(
            f"{resumed.path} follows {saved}, and runs do not store the secrets in an address. "
            f"Give it again: `{command}`."
        )
    return saved


def _absolute(source: str) -> str:
    """Return an address unchanged, or the absolute path of a folder.

    Raises:
        ValueError: the folder does not exist.
    """
    if is_address(source):
        return source
    if not Path(source).is_dir():
        raise ValueError(f"{source} is not a folder. Make it, and add files to it while the run trains.")
    return str(Path(source).resolve())


def _help(words: Sequence[str]) -> int:
    """Print the help, and return the exit code.

    Raises:
        UsageError: there are arguments, but help was not requested.
    """
    wants_help = any(word in (*HELP, HELP_ALL) for word in words)
    if not wants_help and words:
        raise UsageError(f"follow {' '.join(words)}: RECIPE and SOURCE are missing. They come first.")
    try:
        parse_arguments(
            FollowOptions,
            [HELP[1]],
            program="meshrec follow RECIPE SOURCE",
            description=inspect.getdoc(FollowOptions),
        )
    # tyro ends the program after it has printed a help page.
    except SystemExit:
        return 0 if wants_help else 2
    raise AssertionError("tyro prints a help and exits")
