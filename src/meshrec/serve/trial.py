"""The trial of a package: a child process loads it and scores with it before the server does.

Damage that no checksum finds, as with ``--no-verify``, or a program that was compiled for something else, may
end the process that loads it. So the server has a child do it first, and refuses the package if the child
ends.
"""

import asyncio
import contextlib
import os
import resource
import select
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from meshrec.export import CheckedPackage, PackageError, Predictor
from meshrec.serve.child import Child, receive, send
from meshrec.serve.requests import Floats, Request, Signature
from meshrec.serve.samples import read_samples

_SECONDS = 300.0
"""Longest duration of a trial, which loads what the server would load and scores a few batches."""
_MOST_BYTES = 1 << 16
_PASSED = b"passed"
_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
"""Signals that another process sends, or the kernel when memory is short."""
Open = Callable[[CheckedPackage], Predictor]


class WarmUp(NamedTuple):
    """The samples that a model scores before it answers.

    Attributes:
        samples: a file of samples, each a line as ``POST /predict`` takes it; None draws some.
        max_batch: the largest number of samples in a batch.
    """

    samples: Path | None
    max_batch: int

    def requests(self, signature: Signature) -> Sequence[Request]:
        """Return the requests to score.

        Raises:
            RequestError: a sample of the file is not one of this model's.
            OSError: the file cannot be read.
        """
        if self.samples is not None:
            lines = self.samples.read_bytes().splitlines()
            found = [read_samples(line, signature) for line in lines if line]
        else:
            found = [_drawn(signature, size) for size in (1, self.max_batch)]
        if signature.shared:
            found += [
                each._replace(group=np.arange(each.num_samples)) for each in found if each.group is None
            ]
        return found


def signature_of(predictor: Predictor) -> Signature:
    """Return the inputs and outputs of a package."""
    return Signature(
        predictor.features,
        predictor.num_dense,
        predictor.rows,
        predictor.outputs,
        predictor.shared,
        predictor.raw,
        predictor.any_ids,
    )


def scores_of(predictor: Predictor, request: Request) -> Floats:
    """Return the scores [B] of a request, or its vectors [B, V]."""
    scores: Floats = predictor.run(
        torch.from_numpy(request.dense),
        [torch.from_numpy(values) for values in request.values],
        [torch.from_numpy(lengths) for lengths in request.lengths],
        None if request.group is None else torch.from_numpy(request.group),
    ).numpy()
    return scores


class PackageTrial:
    """A child process that loads and warms up packages, one at a time.

    Args:
        open_package: a class or function of a module that opens a package, as the server will.
    """

    def __init__(self, open_package: Open) -> None:
        self._open = open_package
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trial")
        self._child = Child(_try_packages)

    async def __call__(self, package: CheckedPackage, warm_up: WarmUp) -> None:
        """Wait until a child process has loaded the package and scored with it.

        Raises:
            PackageError: it could not; the message says how it ended.
        """
        reason = await asyncio.get_running_loop().run_in_executor(self._pool, self._ask, package, warm_up)
        if reason is not None:
            raise PackageError(reason)

    def close(self) -> None:
        """Stop the child process."""
        self._pool.shutdown()
        self._child.stop()

    def _ask(self, package: CheckedPackage, warm_up: WarmUp) -> str | None:
        try:
            if not self._child.is_running:
                self._child.start()
            reason: str | None = self._child.ask(self._open, package, warm_up, _SECONDS)
        except (EOFError, OSError):
            return _interrupted(package, "ended")
        return reason


def _try_packages(parent: socket.socket) -> None:
    """Load the packages that the parent names, each in a process of its own, until the parent is gone."""
    while True:
        send(parent, _outcome(*receive(parent)))


def _outcome(open_package: Open, package: CheckedPackage, warm_up: WarmUp, seconds: float) -> str | None:
    """Return the reason why a package must not be loaded; None if there is none."""
    here, there = os.pipe()
    with tempfile.TemporaryDirectory(prefix="meshrec-trial-") as folder:
        pid = os.fork()
        if not pid:
            _load_and_exit(lambda: _tried(open_package, package, warm_up), seconds, there, folder)
        os.close(there)
        said = _read_to_the_end(here, time.monotonic() + seconds)
        os.close(here)
        if said is None:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if said == _PASSED and status == 0:
        return None
    code = os.waitstatus_to_exitcode(status)
    if said is None:
        how = f"it was not done after {seconds:.0f} s"
    elif code == 0 and said:
        return said.decode(errors="replace")
    elif -code in _FROM_OUTSIDE:
        return _interrupted(package, f"was ended by {signal.Signals(-code).name}")
    else:
        how = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it exited with code {code}"
    return (
        f"{package.folder} cannot be loaded: a process loaded it for a trial, and {how}. It is damaged or "
        "made for another machine. Copy it again from where it was exported, or export the model again."
    )


def _interrupted(package: CheckedPackage, how: str) -> str:
    """Return the reason after a failure that says nothing about the package."""
    return (
        f"the process that tries out {package.folder} {how}. Somebody killed it, or memory or the disk was "
        "full. Load the package again."
    )


def _load_and_exit(load: Callable[[], bytes], seconds: float, to: int, folder: str) -> None:
    """Load a package and score with it, in a process that exits after that."""
    said = b""
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.alarm(int(seconds) + 10)  # whatever becomes of the parent
        os.environ["TMPDIR"] = folder  # where torch extracts programs: the parent removes it in any case
        torch.set_num_threads(1)
        found: list[bytes] = []
        # OpenMP's threads are those of the thread that first needs them, and a fork leaves them behind.
        thread = threading.Thread(target=lambda: found.append(load()))
        thread.start()
        thread.join()
        said, code = found[0], 0
    finally:
        with contextlib.suppress(OSError):
            os.write(to, said[:_MOST_BYTES])
        os._exit(code)


def _tried(open_package: Open, package: CheckedPackage, warm_up: WarmUp) -> bytes:
    try:
        predictor = open_package(package)
        for request in warm_up.requests(signature_of(predictor)):
            scores_of(predictor, request)
    except Exception as error:
        is_known = isinstance(error, PackageError | ValueError | OSError)
        return (str(error) if is_known else f"{type(error).__name__}: {error}").encode() or b"no reason"
    return _PASSED


def _read_to_the_end(descriptor: int, deadline: float) -> bytes | None:
    """Return what is written to a pipe until it is closed; None if that is not before the deadline."""
    found = b""
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        part = os.read(descriptor, _MOST_BYTES)
        if not part:
            return found
        found += part


def _drawn(signature: Signature, num_samples: int) -> Request:
    """Return samples with one id of each feature, drawn from its whole table."""
    draw = np.random.default_rng(0)
    return Request(
        draw.standard_normal((num_samples, signature.num_dense), np.float32),
        [draw.integers(0, signature.rows.get(f, 1), num_samples) for f in signature.features],
        [np.ones(num_samples, np.int64) for _ in signature.features],
    )
