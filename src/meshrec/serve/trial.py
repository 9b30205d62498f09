"""Trial load: a child process loads a package and scores samples with it, before the server does.

Damage without a failing checksum (as with ``--no-verify``), or a program compiled for another machine, may
crash the process which loads the package. So a child loads it first. The server refuses a package which
crashes the child.
"""

import asyncio
import contextlib
import os
import resource
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from meshrec.durable import scratch_folder
from meshrec.export import CheckedPackage, PackageError, Predictor
from meshrec.serve.child import Child, receive, send
from meshrec.serve.requests import Floats, Request, Signature
from meshrec.serve.samples import read_samples

# Maximum duration of a trial: load the package and score a few batches.
_SECONDS = 300.0
# Maximum bytes of a trial's report.
_MAX_BYTES = 1 << 16
# Report of a trial which passed.
_PASSED = b"passed"
# Signals sent by other processes, or by the kernel when memory is short.
_EXTERNAL_SIGNALS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
Open = Callable[[CheckedPackage], Predictor]
"""Function which loads a package."""


class WarmUp(NamedTuple):
    """Samples that a model scores before it answers requests.

    Attributes:
        samples: file with a line per request, in the JSON format of ``POST /predict``; None: random samples.
        max_batch: maximum samples per batch, which random requests use.
    """

    samples: Path | None
    max_batch: int

    def requests(self, signature: Signature) -> Sequence[Request]:
        """Return the requests to score: those in the file, or random ones with 1 and `max_batch` samples.

        If the model has inputs which samples can share, every request without shared inputs is added a second
        time, in the form with shared inputs.

        Raises:
            RequestError: a sample does not match the model.
            OSError: the file cannot be read.
        """
        if self.samples is not None:
            lines = self.samples.read_bytes().splitlines()
            requests = [read_samples(line, signature) for line in lines if line]
        else:
            # The smallest and the largest batch, whose shapes a compiled program must both support.
            requests = [_random_request(signature, size) for size in (1, self.max_batch)]
        if signature.shared:
            requests += [
                request._replace(group=np.arange(request.num_samples))
                for request in requests
                if request.group is None
            ]
        return requests


def signature_of(predictor: Predictor) -> Signature:
    """Return the inputs and outputs of a loaded package."""
    return Signature(
        predictor.features,
        predictor.num_dense,
        predictor.rows,
        predictor.outputs,
        predictor.shared,
        predictor.raw,
        predictor.any_ids,
    )


def compute_scores(predictor: Predictor, request: Request) -> Floats:
    """Compute the scores [B] or vectors [B, V] of a request, which must be checked already."""
    scores: Floats = predictor.run(
        torch.from_numpy(request.dense),
        [torch.from_numpy(values) for values in request.values],
        [torch.from_numpy(lengths) for lengths in request.lengths],
        None if request.group is None else torch.from_numpy(request.group),
    ).numpy()
    return scores


class PackageTrial:
    """Child process which tries to load packages, one at a time."""

    def __init__(self, open_package: Open) -> None:
        self._open = open_package
        # Waits for the child, so that the event loop does not.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trial")
        # Forks a process per package, and survives when that process crashes.
        self._child = Child(_try_packages)

    async def __call__(self, package: CheckedPackage, warm_up: WarmUp) -> None:
        """Load a package and score the warm-up samples in the child process.

        Raises:
            PackageError: the trial failed. The message has the reason.
        """
        reason = await asyncio.get_running_loop().run_in_executor(self._pool, self._ask, package, warm_up)
        if reason is not None:
            raise PackageError(reason)

    def close(self) -> None:
        """Stop the child process."""
        self._pool.shutdown()
        self._child.stop()

    def _ask(self, package: CheckedPackage, warm_up: WarmUp) -> str | None:
        """Wait for the trial of a package. Return why the package cannot be loaded, or None if it passed."""
        try:
            if not self._child.is_running:
                self._child.start()
            reason: str | None = self._child.ask(self._open, package, warm_up, _SECONDS)
        except (EOFError, OSError):
            return _interruption_message(package, "ended")
        return reason


def _try_packages(parent: socket.socket) -> None:
    """Main loop of the child: try packages from the parent, each in a fork, until the parent exits."""
    while True:
        send(parent, _trial_failure(*receive(parent)))


def _trial_failure(
    open_package: Open, package: CheckedPackage, warm_up: WarmUp, seconds: float
) -> str | None:
    """Load a package and score the warm-up samples in a forked process.

    Returns:
        Why the package must not be loaded, or None if the trial passed.
    """
    here, there = os.pipe()
    with scratch_folder("meshrec-trial") as folder:
        pid = os.fork()
        if not pid:
            _load_and_exit(lambda: _try_package(open_package, package, warm_up), seconds, there, str(folder))
        # The child has the only writing end, so the pipe ends when the child does.
        os.close(there)
        reported = _read_to_the_end(here, time.monotonic() + seconds)
        os.close(here)
        if reported is None:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if reported == _PASSED and status == 0:
        return None
    code = os.waitstatus_to_exitcode(status)
    if reported is None:
        how = f"it did not finish within {seconds:.0f} s"
    elif code == 0 and reported:
        return reported.decode(errors="replace")
    elif -code in _EXTERNAL_SIGNALS:
        return _interruption_message(package, f"was ended by {signal.Signals(-code).name}")
    else:
        how = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it exited with code {code}"
    return (
        f"{package.folder} cannot be loaded: in a trial process, {how}. The package is damaged or "
        "made for another machine. Copy it again from its source, or export the model again."
    )


def _interruption_message(package: CheckedPackage, how: str) -> str:
    """Return the message for a trial which failed for reasons outside the package."""
    return (
        f"the trial process for {package.folder} {how}. It was killed, or memory or the disk was "
        "full. Load the package again."
    )


def _load_and_exit(load: Callable[[], bytes], seconds: float, to: int, folder: str) -> None:
    """Run a function, write its result to a pipe, and exit the process. Called in a fork."""
    report = b""
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash here is expected, and needs no core dump
        signal.alarm(int(seconds) + 10)  # even if the parent dies
        os.environ["TMPDIR"] = folder  # torch extracts programs here; the parent removes the folder
        torch.set_num_threads(1)
        # Filled by the thread. It stays empty if the thread raises, and reports[0] fails.
        reports: list[bytes] = []
        # In a new thread: OpenMP teams belong to the thread which created them, and do not survive a fork.
        thread = threading.Thread(target=lambda: reports.append(load()))
        thread.start()
        thread.join()
        report, code = reports[0], 0
    finally:
        # The parent may have stopped reading after its timeout.
        with contextlib.suppress(OSError):
            os.write(to, report[:_MAX_BYTES])
        os._exit(code)  # without the exit handlers inherited from the parent


def _try_package(open_package: Open, package: CheckedPackage, warm_up: WarmUp) -> bytes:
    """Load a package and score the warm-up samples in this process. Return `_PASSED` or the error message."""
    try:
        predictor = open_package(package)
        for request in warm_up.requests(signature_of(predictor)):
            compute_scores(predictor, request)
    except Exception as error:
        is_expected = isinstance(error, PackageError | ValueError | OSError)
        # An empty report would look like a crash.
        return (str(error) if is_expected else f"{type(error).__name__}: {error}").encode() or b"no reason"
    return _PASSED


def _read_to_the_end(descriptor: int, deadline: float) -> bytes | None:
    """Return all bytes from a pipe until it is closed; None if the deadline passes before."""
    content = b""
    while True:
        # `os.read` alone would wait without a time limit.
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        part = os.read(descriptor, _MAX_BYTES)
        if not part:
            return content
        content += part


def _random_request(signature: Signature, num_samples: int) -> Request:
    """Return a request with random samples, which have an ID per feature, drawn from the whole table."""
    draw = np.random.default_rng(0)
    return Request(
        draw.standard_normal((num_samples, signature.num_dense), np.float32),
        [draw.integers(0, signature.rows.get(f, 1), num_samples) for f in signature.features],
        [np.ones(num_samples, np.int64) for _ in signature.features],
    )
