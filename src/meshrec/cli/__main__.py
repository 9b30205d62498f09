"""Entry point for the command line: ``meshrec``, or ``python -m meshrec.cli``."""

import importlib
import runpy
import sys
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

from meshrec.lazy import without_gc


class Command(NamedTuple):
    """A subcommand, such as ``meshrec train``.

    Attributes:
        module: module with a function ``main(arguments)``, which runs the command and returns the exit code.
        summary: help text, a single line.
    """

    module: str
    summary: str


# Commands by name. A module is imported only when its command runs, so `meshrec --help` need not wait for
# torch.
COMMANDS = {
    "inspect": Command("meshrec.cli.inspect", "Look at your data and write a recipe for it."),
    "train": Command("meshrec.cli.train", "Train a recipe; its run folder holds everything to look at."),
    "join": Command("meshrec.cli.join", "Join impressions and later actions to labelled rows."),
    "follow": Command("meshrec.cli.follow", "Train a recipe on a stream of records, without an end."),
    "fit": Command("meshrec.cli.fit", "Fit a recipe's features once, for any number of runs."),
    "leaderboard": Command("meshrec.cli.leaderboard", "Compare models on your data, on one split."),
    "embed": Command("meshrec.cli.embed", "Write the embeddings of a feature, with their values."),
    "recipe": Command("meshrec.cli.recipe", "Write a recipe as YAML."),
    "tune": Command("meshrec.cli.tune", "Search a recipe's options; train with several seeds."),
    "evaluate": Command("meshrec.cli.evaluate", "Compute a run's metrics on other data."),
    "predict": Command("meshrec.cli.predict", "Score data with a run's model, in the order of the data."),
    "explain": Command("meshrec.cli.explain", "Tell what the columns contribute to predictions of rows."),
    "recommend": Command("meshrec.cli.recommend", "Write the best items for users, by a run of next items."),
    "similar": Command("meshrec.cli.similar", "Write the items most similar to others, by their vectors."),
    "runs": Command("meshrec.cli.runs", "List, compare and remove training runs."),
    "checkpoint": Command(
        "meshrec.cli.checkpoint", "Inspect and verify checkpoints; export and import weights."
    ),
    "export": Command("meshrec.cli.export", "Write a run's model as a package that answers requests."),
    "quantize": Command("meshrec.cli.quantize", "Quantise a run's tables, within a budget of loss."),
    "serve": Command("meshrec.cli.serve", "Answer requests over HTTP with exported models."),
    "delta": Command("meshrec.cli.delta", "Verify the deltas that training publishes for servers."),
    "plan": Command("meshrec.cli.plan", "Plan where tables go; explain and compare plans."),
    "launch": Command("meshrec.cli.launch", "Start a run on Slurm; print manifests for Kubernetes."),
    "doctor": Command("meshrec.cli.doctor", "Examine the hosts before training; a remedy for each finding."),
    "calibrate": Command("meshrec.cli.calibrate", "Measure this machine for the planner."),
}


def main() -> int:
    """Run the command given by ``sys.argv``, and return the exit code.

    Errors that the user can fix are printed as a single line, without a traceback. The exit code is then 2
    for wrong arguments, and 1 for other errors.
    """
    arguments = sys.argv[1:]
    # Only a request for help is a success; a missing command is a usage error.
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"meshrec {version('meshrec')}")
        return 0
    name, *remaining = arguments
    if name not in COMMANDS:
        # Imported only for the error message, so that commands start without it.
        from meshrec.data.faults import did_you_mean

        kind = "option" if name.startswith("-") else "command"
        print(
            f"meshrec: there is no {kind} {name!r}; the command comes first, one of {', '.join(COMMANDS)}."
            f"{did_you_mean(name, COMMANDS)}",
            file=sys.stderr,
        )
        return 2
    return _run_command(COMMANDS[name], remaining)


def _run_command(command: Command, arguments: Sequence[str]) -> int:
    """Run a subcommand, and return the exit code.

    Errors that the user can fix are printed as a single line. Other errors are raised, with a traceback.
    """
    try:
        # Imports create many objects, and garbage collections would slow them down.
        with without_gc():
            module = importlib.import_module(command.module)
        code: int = module.main(arguments)
        return code
    except (ValueError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            # Errors about missing extras have no name. With a name, the import failed elsewhere: show where.
            raise
        print(f"meshrec: {error}", file=sys.stderr)
        return int(getattr(error, "exit_code", 1))
    except (MemoryError, RuntimeError) as error:
        from meshrec.ops.operators import OutOfMemoryError, translate_error

        if not isinstance(error, MemoryError) and not isinstance(translate_error(error), OutOfMemoryError):
            raise
        reason = str(error).partition("\n")[0] or "Python could not allocate memory"
        print(
            f"meshrec: there is not enough memory: {reason}. Use smaller tables or batches, or more ranks.",
            file=sys.stderr,
        )
        return 1
    except OSError as error:
        from meshrec.durable import FULL, name_full_disk

        # A failed write may not name the file. Any argument may be a path on the full disk.
        values = (word.partition("=")[2] if word.startswith("--") else word for word in arguments)
        name_full_disk(error, [*filter(None, values), "runs", tempfile.gettempdir(), "."])
        full = error.errno in FULL
        if not full and (error.filename is None or command is COMMANDS["train"]):  # show where it happened
            raise
        where = error.filename
        remedy = "Make room on the disk" if full else "Look at the path and its permissions"
        print(f"meshrec: {where}: {error.strerror}. {remedy}.", file=sys.stderr)
        return 1


def _help() -> str:
    """Return the help text with all commands, without importing their modules."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: meshrec [-h] [--version] {{{','.join(COMMANDS)}}} ...",
            "",
            "Recommender models with large embedding tables: train them, plan where their tables go.",
            "",
            "commands:",
            *lines,
            "",
            "`meshrec COMMAND --help` lists the options of a command.",
        ]
    )


if __name__ == "__main__":
    # meshrec/__main__.py handles interrupts and closed output pipes for all ways to start a command.
    runpy.run_module("meshrec", run_name="__main__", alter_sys=True)
