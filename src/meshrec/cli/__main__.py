"""``python -m meshrec.cli``, and the ``meshrec`` command."""

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Command(NamedTuple):
    """Where ``main(arguments) -> exit code`` of a command is, and what it does."""

    module: str
    summary: str


COMMANDS = {
    "inspect": Command("meshrec.cli.inspect", "Looks at tables, and writes the recipe that it would train."),
    "train": Command("meshrec.cli.train", "Trains a recipe, and leaves a folder with all there is to see."),
    "embed": Command("meshrec.cli.embed", "Writes the vectors of a feature, with the values that have them."),
    "tune": Command("meshrec.cli.tune", "Searches a recipe's options, and trains with several seeds."),
    "evaluate": Command("meshrec.cli.evaluate", "Judges a run by other data."),
    "predict": Command("meshrec.cli.predict", "Scores data with a run's model, in the order of the data."),
    "runs": Command("meshrec.cli.runs", "Lists the training runs, compares and removes them."),
    "checkpoint": Command("meshrec.cli.checkpoint", "Looks into checkpoints, takes weights in and out."),
    "export": Command("meshrec.cli.export", "Writes a run's model as a package that answers requests."),
    "quantize": Command("meshrec.cli.quantize", "Makes a run's tables smaller, within a budget of loss."),
    "serve": Command("meshrec.cli.serve", "Answers requests over HTTP with exported models."),
    "delta": Command("meshrec.cli.delta", "Verifies the deltas that training publishes for servers."),
    "plan": Command("meshrec.cli.plan", "Plans where tables go, explains and compares plans."),
    "calibrate": Command("meshrec.cli.calibrate", "Measures this machine for the planner."),
}
_FULL = (errno.ENOSPC, errno.EDQUOT)


def main() -> int:
    """Runs the command line; 1 with a message for what the user can mend."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"meshrec {version('meshrec')}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        print(
            f"meshrec: there is no {kind} {name!r}; the command comes first, one of {', '.join(COMMANDS)}.",
            file=sys.stderr,
        )
        return 2
    return _run(COMMANDS[name], rest)


def _run(command: Command, arguments: Sequence[str]) -> int:
    try:
        code: int = importlib.import_module(command.module).main(arguments)
        return code
    except (ValueError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name is not None:  # of no extra
            raise
        print(f"meshrec: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        full = error.errno in _FULL
        if not full and (error.filename is None or command is COMMANDS["train"]):  # a rank shows where
            raise
        where = error.filename or os.getcwd()
        remedy = "Make room on the disk" if full else "Look at the path and its permissions"
        print(f"meshrec: {where}: {error.strerror}. {remedy}.", file=sys.stderr)
        return 1


def _help() -> str:
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
            "`meshrec COMMAND --help` says what a command takes.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
