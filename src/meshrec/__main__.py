"""``python -m meshrec`` and the ``meshrec`` command, also for ``torchrun -m meshrec``."""

from meshrec.interpreter import SAFE_PATH_VARIABLE, drop_current_folder

if __name__ == "__main__":
    drop_current_folder()  # before the imports: a stray signal.py in it would run

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
"""Exit status which a shell reports for a program ended by SIGPIPE: the reader of a pipe has gone."""


def main() -> int:
    """Run the command line; if a package is missing, print which extra installs it."""
    try:
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
        if isinstance(ended.__context__, BrokenPipeError):  # in whose place rich raises it
            return _SIGPIPE_STATUS
        if not isinstance(ended.code, int):
            raise
        return ended.code


def command() -> NoReturn:
    """Run `main` as the whole program, and end the process at once.

    Like the children of :mod:`multiprocessing`, it waits for threads, runs the exit functions and flushes its
    output. It skips the destruction of torch's objects, which takes a second or two.
    """
    declare_command()
    os.environ.setdefault(SAFE_PATH_VARIABLE, "1")  # for compilers, trackers and launchers that torch starts
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    code = main()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        os._exit(_SIGPIPE_STATUS)
    except (OSError, ValueError):  # nobody reads any more, which Python itself knows how to say
        sys.exit(code)
    os._exit(code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or end the process at once while a module is being imported.

    A library that tries to import another one may catch the interrupt: the command would then continue, or
    fail later with an ImportError of a module that was half loaded.
    """
    importing = frame
    while importing is not None and not importing.f_code.co_filename.startswith("<frozen importlib"):
        importing = importing.f_back
    if importing is None:
        raise KeyboardInterrupt
    _print_stopped()
    sys.stderr.flush()
    os._exit(128 + signal.SIGINT)


def _print_stopped() -> None:
    """Tell the user that Ctrl-C stopped the command."""
    if "RANK" not in os.environ:  # a launcher speaks for the ranks
        print("meshrec: stopped", file=sys.stderr)


if __name__ == "__main__":
    command()
