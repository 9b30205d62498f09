"""``python -m meshrec.cli``, and the ``meshrec`` command."""

import sys
from typing import Annotated

import tyro

from meshrec.cli import calibrate, checkpoint, plan, runs, train
from meshrec.cli.arguments import parse

_COMMANDS = (
    Annotated[train.TrainOptions, tyro.conf.subcommand("train")]
    | Annotated[runs.RunsOptions, tyro.conf.subcommand("runs")]
    | Annotated[checkpoint.CheckpointOptions, tyro.conf.subcommand("checkpoint")]
    | Annotated[plan.PlanOptions, tyro.conf.subcommand("plan")]
    | Annotated[calibrate.CalibrateOptions, tyro.conf.subcommand("calibrate")]
)
_DESCRIPTION = "Recommender models with large embedding tables: train them, plan where their tables go."


def main() -> int:
    """Runs the command line; 1 with a message for what the user can mend."""
    try:
        if sys.argv[1:2] == ["train"]:  # its options depend on the recipe that it names
            return train.main(sys.argv[2:])
        if sys.argv[1:2] == ["checkpoint"]:  # it has commands of its own
            return checkpoint.main(sys.argv[2:])
        options = parse(_COMMANDS, sys.argv[1:], program="meshrec", description=_DESCRIPTION)
        match options:
            case plan.PlanOptions():
                plan.run(options)
            case runs.RunsOptions():
                runs.run(options)
            case calibrate.CalibrateOptions():
                calibrate.run(options)
    except (ValueError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name is not None:  # of no extra
            raise
        print(f"meshrec: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.filename is None or sys.argv[1] == "train":  # a rank that fails shows where
            raise
        print(
            f"meshrec: {error.filename}: {error.strerror}. Look at the path and its permissions.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
