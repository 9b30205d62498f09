"""``python -m meshrec`` and the ``meshrec`` command, also for ``torchrun -m meshrec``."""

import atexit
import gc
import os
import signal
import sys


def main() -> int:
    """Runs the command line, or says which extra it needs."""
    # Python's last collections would go through all objects of torch and its like, a second of nothing.
    atexit.register(gc.freeze)
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


if __name__ == "__main__":
    sys.exit(main())
