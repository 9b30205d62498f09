"""Programs that start as forks of a process which has imported torch: to import it takes seconds."""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import IO

_CONTEXT = get_context("forkserver")  # tests/conftest.py names what it imports before it forks


class ForkedProgram:
    """What tests use of ``subprocess.Popen``, for a function in a process of its own with a single thread.

    Its standard output is discarded.

    Args:
        main: module and function, "tests.serve.toys:main". It reads its arguments from ``sys.argv``, and
            returns the exit code.
        arguments: arguments after the program's name.
        environment: the variables of the process; None: those of this process.
        cwd: the folder in which it starts; None: that of this process.
        stderr: file for standard error; ``subprocess.PIPE``: a pipe, whose other end is ``self.stderr``.
    """

    def __init__(
        self,
        main: str,
        arguments: Sequence[object],
        *,
        environment: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stderr: IO[str] | int = subprocess.DEVNULL,
    ) -> None:
        self.stderr: IO[str] | None = None
        if stderr == subprocess.PIPE:
            reader, writer = os.pipe()
            self.stderr = os.fdopen(reader)
        else:
            writer = os.open(os.devnull, os.O_WRONLY) if isinstance(stderr, int) else os.dup(stderr.fileno())
        with Connection(writer, readable=False) as errors:
            self._process = _CONTEXT.Process(
                target=_run,
                args=(
                    main,
                    list(map(str, arguments)),
                    dict(os.environ if environment is None else environment),
                    str(cwd or os.getcwd()),
                    errors,
                ),
            )
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _run(main: str, arguments: list[str], environment: dict[str, str], cwd: str, errors: Connection) -> None:
    """Become the program: its standard streams, folder, variables, arguments."""
    os.dup2(errors.fileno(), 2)
    errors.close()
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it was found in the variables of another process
    warnings.simplefilter("ignore")
    module, _, name = main.partition(":")
    sys.argv = [name, *arguments]
    sys.exit(getattr(importlib.import_module(module), name)())
