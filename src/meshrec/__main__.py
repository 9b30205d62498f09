"""``python -m meshrec`` and the ``meshrec`` command, also for ``torchrun -m meshrec``."""

import sys


def main() -> int:
    """Runs the command line, or says which extra it needs."""
    try:
        from meshrec.cli.__main__ import main as run
    except ModuleNotFoundError as error:
        print(
            f"meshrec: the command line needs the package {error.name!r}: pip install 'meshrec[cli,train]'",
            file=sys.stderr,
        )
        return 1
    return run()


if __name__ == "__main__":
    sys.exit(main())
