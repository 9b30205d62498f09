"""``python -m meshrec.cli``, and the ``meshrec`` command."""

import sys
from typing import Annotated

import tyro

from meshrec.cli import calibrate, plan


def main() -> int:
    """Runs the command line; 1 with a message for what the user can mend."""
    options = tyro.cli(
        Annotated[plan.PlanOptions, tyro.conf.subcommand("plan")]
        | Annotated[calibrate.CalibrateOptions, tyro.conf.subcommand("calibrate")],
        prog="meshrec",
    )
    try:
        if isinstance(options, plan.PlanOptions):
            plan.run(options)
        else:
            calibrate.run(options)
    except ValueError as error:
        print(f"meshrec: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
