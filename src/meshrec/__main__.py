"""Entry point for ``python -m meshrec``, the ``meshrec`` command, and ``torchrun -m meshrec``."""

from meshrec.interpreter import SAFE_PATH_VARIABLE, drop_current_folder

if __name__ == "__main__":
    # Before the imports below, which would run a stray signal.py in the current folder.
    drop_current_folder()

import atexit
import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

from meshrec.cli.unread import has_no_reader
from meshrec.lazy import declare_command

_SIGPIPE_STATUS = 128 + 13
"""Exit status after writing to a pipe without a reader, as a shell reports it for SIGPIPE."""


def main() -> int:
    """Run the command line, and return the exit status.

    If a package for the command line is missing, prints how to install it.
    """
    try:
        # Imported here, because it needs packages that may be missing.
        from meshrec.cli.__main__ import main as run

        return run()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("tyro", "rich"):
            raise
        print(
            f'meshrec: the command line needs the package {error.name!r}: pip install "meshrec[cli,train]"',
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        _print_stopped()
        return 128 + signal.SIGINT
    except BrokenPipeError:
        if not has_no_reader():
            raise
        return _SIGPIPE_STATUS
    except SystemExit as ended:
        # rich raises SystemExit where a pipe without a reader has raised BrokenPipeError.
        if isinstance(ended.__context__, BrokenPipeError):
            return _SIGPIPE_STATUS
        if not isinstance(ended.code, int):
            raise
        return ended.code


def command() -> NoReturn:
    """Run `main` as the whole program, and end the process without destroying Python objects.

    Like child processes in :mod:`multiprocessing`, the process waits for threads, runs the exit functions and
    flushes its output. Destroying torch's objects would take another second or two.
    """
    declare_command()
    # For compilers, trackers and launchers started by torch.
    os.environ.setdefault(SAFE_PATH_VARIABLE, "1")
    # Leave any other setting, such as a background job's, which ignores SIGINT.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    code = main()
    # The order of a normal interpreter exit: threads, exit functions, output.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        os._exit(_SIGPIPE_STATUS)
    except (OSError, ValueError):
        # The output cannot be written. Let Python's normal exit report the error.
        sys.exit(code)
    os._exit(code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C: raise KeyboardInterrupt, or if a module is being imported, end the process at once.

    A library may catch KeyboardInterrupt while it tries to import another library. The command would then
    continue, or fail later with an ImportError for a module that is only half loaded.
    """
    # Python's import machinery is on the stack if a module is being imported.
    importing = frame
    while importing is not None and not importing.f_code.co_filename.startswith("<frozen importlib"):
        importing = importing.f_back
    if importing is None:
        raise KeyboardInterrupt
    _print_stopped()
    sys.stderr.flush()
    os._exit(128 + signal.SIGINT)


def _print_stopped() -> None:
    """Print that Ctrl-C stopped the command."""
    # On a rank the launcher prints the message, once for all ranks.
    if "RANK" not in os.environ:
        print("meshrec: stopped", file=sys.stderr)


if __name__ == "__main__":
    command()
