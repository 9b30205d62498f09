"""``python -m meshrec`` and the ``meshrec`` command, also for ``torchrun -m meshrec``."""

import atexit
import os
import signal
import sys
import threading
from typing import NoReturn


def main() -> int:
    """Runs the command line, or says which extra it needs."""
    try:
        from meshrec.cli.__main__ import main as run

        return run()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("tyro", "rich", "torchmetrics"):
            raise
        print(
            f'meshrec: the command line needs the package {error.name!r}: pip install "meshrec[cli,train]"',
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        if "RANK" not in os.environ:  # a launcher speaks for its ranks
            print("meshrec: stopped", file=sys.stderr)
        return 128 + signal.SIGINT


def command() -> NoReturn:
    """``main`` for a process of its own, which ends at once.

    As the children of :mod:`multiprocessing` do: threads have ended, what is registered for the exit has
    run, and all is written; but torch and its like are not taken apart object by object, a second or two
    of nothing.
    """
    code = main()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # nobody reads any more, which Python itself knows how to say
        sys.exit(code)
    os._exit(code)


if __name__ == "__main__":
    command()
