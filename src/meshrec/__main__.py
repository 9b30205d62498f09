"""``python -m meshrec``: the ``meshrec`` command, also for ``torchrun -m meshrec``."""

import sys

if __name__ == "__main__":
    try:
        from meshrec.cli.__main__ import main
    except ModuleNotFoundError as error:
        sys.exit(f"meshrec: the command line needs the package {error.name!r}: pip install 'meshrec[cli]'")
    sys.exit(main())
