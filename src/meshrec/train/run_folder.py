"""The folder of a run, ``runs/<name>/``."""

import contextlib
import dataclasses
import json
import math
import os
import shutil
import socket
import time
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple

from meshrec.durable import DamageError, read_regular, sealed, unsealed
from meshrec.durable.sealed import SEAL

CONFIG = "config.json"
PLAN = "plan.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
STATE = "state.json"
DELTAS = "deltas"
RUNS = Path("runs")
_MOST_BYTES = 1 << 28

StateName = Literal["running", "stopped", "failed", "finished"]


class RunState(NamedTuple):
    """The content of ``state.json``. ``error`` is the last line of the error that ended a failed run."""

    name: StateName
    error: str | None = None
    step: int | None = None


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Paths in a run's folder, and its small files."""

    path: Path
    is_trusted: bool = False
    """Whether the user allowed the run's source to be executed, see run_source.py."""

    @property
    def plan(self) -> Path:
        """The plan, in the form that `meshrec plan` reads."""
        return self.path / PLAN

    @property
    def plan_page(self) -> Path:
        """The plan as a page."""
        return self.path / "plan.html"

    @property
    def report(self) -> Path:
        """The report page of the run."""
        return self.path / "report.html"

    @property
    def phases(self) -> Path:
        """The file with the time per phase and rank."""
        return self.path / "phases.jsonl"

    @property
    def whole_phases(self) -> Path:
        """The file with the time per phase and rank of steps without overlap; only pipelined runs have it."""
        return self.path / "phases_whole.jsonl"

    def trace(self, rank: int) -> Path:
        """Return the file of the profiler's trace of a rank."""
        return self.path / f"trace_rank{rank}.json.gz"

    def error(self, rank: int) -> Path:
        """Return the file of the error of a rank."""
        return self.path / f"error_rank{rank}.txt"

    def log(self, rank: int) -> Path:
        """Return the file of the full log of a rank."""
        return self.path / f"log_rank{rank}.txt"

    def process(self, rank: int) -> Path:
        """Return the file that holds a rank's process ID while the rank works."""
        return self.path / f".process_rank{rank}"

    @property
    def has_checkpoint(self) -> bool:
        """Whether the folder has a state from which training can continue."""
        return any(self.path.glob("checkpoints/step-*/manifest.json"))

    def write_json(self, name: str, value: Any, *, seal: bool = False) -> None:
        """Write a file atomically: readers see the old or the new contents. NaN and infinity become null.

        Args:
            name: the file's name.
            value: its contents.
            seal: add a checksum, for an object that decides what a run computes.
        """
        text = json.dumps(_finite(value), indent=1, allow_nan=False) + "\n"
        if seal:
            text = sealed(json.loads(text)).decode()  # loaded: keys are text then, as they are when read
        scratch = self.path / f".{name}.{os.getpid()}"
        try:
            scratch.write_text(text)
        except OSError:
            scratch.unlink(missing_ok=True)
            raise
        scratch.replace(self.path / name)

    def write_state(self, name: StateName, *, error: str | None = None, step: int | None = None) -> None:
        """Write the state of the run, with the process that runs it."""
        self.write_json(
            STATE,
            {
                "state": name,
                "error": error,
                "step": step,
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "time": now(),
            },
        )

    def state(self) -> RunState:
        """Read the state of the run. A run whose process on this machine is gone has failed."""
        found = self.read_json(STATE)
        if found is None:  # written by an earlier release
            return RunState((self.read_json(SUMMARY) or {}).get("state", "failed"), None, None)
        lost = found["host"] == socket.gethostname() and not _is_alive(found["pid"])
        if found["state"] == "running" and lost:
            return RunState(
                "failed", "it ended without an error: killed, or out of memory", self._last_step()
            )
        return RunState(found["state"], found["error"], found["step"])

    def _last_step(self) -> int | None:
        return max((line["step"] for line in self.metrics()), default=None)

    def read_json(self, name: str) -> Any:
        """Read what `write_json` wrote; return None if the file does not exist.

        Raises:
            ValueError: the file cannot be read, is damaged, or was changed without its checksum.
        """
        path = self.path / name
        try:
            return unsealed(read_regular(path, _MOST_BYTES), name, required=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror}). Look at its permissions.") from error
        except DamageError as error:
            raise ValueError(
                f"{path} is damaged: {error}. Restore it from a copy. If you changed it yourself, delete its "
                f"{SEAL!r}."
            ) from error

    def append_metrics(self, values: dict[str, Any]) -> None:
        """Add a line to ``metrics.jsonl``."""
        with (self.path / METRICS).open("a") as file:
            file.write(json.dumps(_finite(values), allow_nan=False) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """Read the lines of ``metrics.jsonl``, without a last line that was cut off."""
        return _lines(self.path / METRICS)

    def forget_after(self, step: int, *, judged: bool) -> None:
        """Remove the lines that were recorded after ``step``, and lines that were cut off: a resumed run
        records them again.

        Args:
            step: the step from which training continues.
            judged: whether the step was evaluated already; otherwise its evaluation is removed and recorded
                again.
        """
        last = {"validation": step if judged else step - 1, "test": -1}
        for path in (self.path / METRICS, self.phases, self.whole_phases):
            if path.exists():
                kept = [line for line in _lines(path) if line["step"] <= last.get(line.get("kind", ""), step)]
                scratch = path.with_name(f".{path.name}")
                scratch.write_text("".join(json.dumps(line) + "\n" for line in kept))
                scratch.replace(path)


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return found


def new_run(name: str | None, recipe: str, runs: Path = RUNS, *, resume: bool = False) -> RunFolder:
    """Return the folder of a new run, or with ``resume`` the folder of the run to continue.

    Without a name, it is the recipe's name with the next free number; to resume, with the last number.

    Raises:
        ValueError: the folder of a new run contains a run already or cannot be made, or there is no run to
            resume.
    """
    if name is not None and (Path(name).name != name or name in ("", "..")):
        raise ValueError(
            f"--name {name}: a run's name is the name of its folder in {runs}; --runs sets that folder."
        )
    if resume:
        path = runs / name if name is not None else _last(runs, recipe)
        if path is None or not (path / CONFIG).is_file():
            what = (
                f"{path.resolve()} has no run"
                if path is not None
                else f"{runs.resolve()} has no run of {recipe}"
            )
            known = ", ".join(run.path.name for run in all_runs(runs)) or "none"
            raise ValueError(
                f"{what} to resume; leave out --resume, or name one with --name. There are: {known}."
            )
        return RunFolder(path)
    try:
        if name is None:
            return _next(runs, recipe)
        path = runs / name
        if (path / CONFIG).exists():
            raise ValueError(f"{path} has a run already; use another --name, or continue it with --resume.")
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"no folder for the run can be made in {runs}: {error}. Name another --runs."
        ) from error
    return RunFolder(path)


def find_run(name: str | Path, runs: Path = RUNS, *, trust: bool = False) -> RunFolder:
    """Find a run by its name or its path.

    Args:
        name: the run's name, or the path of its folder.
        runs: where run folders are.
        trust: whether the source of its recipe may be executed although somebody else trained the run.

    Raises:
        ValueError: there is no such run.
    """
    for path in (runs / name, Path(name)):
        if (path / CONFIG).is_file():
            return RunFolder(path, trust)
    known = ", ".join(run.path.name for run in all_runs(runs)) or "none"
    raise ValueError(
        f"there is no run {str(name)!r} in {runs.resolve()}; there are: {known}. --runs names another folder."
    )


def run_or_path(path: Path, runs: Path = RUNS) -> Path:
    """Return the folder of a run that is given by its name, or else ``path`` itself."""
    return runs / path if not path.exists() and (runs / path / CONFIG).is_file() else path


def remove_run(folder: RunFolder) -> None:
    """Remove a run and all its files.

    Raises:
        ValueError: the run is still running.
    """
    if folder.state().name == "running":
        raise ValueError(f"{folder.path} is running; stop it first, then remove it.")
    shutil.rmtree(folder.path)


def drop_unstarted(folder: RunFolder) -> None:
    """Remove the folder of a run that ended before its first step."""
    for _ in range(20):
        if not folder.path.exists() or (folder.path / CONFIG).exists():
            return
        shutil.rmtree(folder.path, ignore_errors=True)
        time.sleep(0.02)  # other ranks of this host write their failures, and remove the folder as well


def all_runs(runs: Path = RUNS) -> list[RunFolder]:
    """Return all runs, oldest first."""
    found = [path.parent for path in runs.glob(f"*/{CONFIG}")]
    return [RunFolder(path) for path in sorted(found, key=lambda path: (path / CONFIG).stat().st_mtime)]


def to_json(value: Any) -> Any:
    """Return a config as plain JSON types. A dataclass has its class as ``"type"``, or its own ``to_json``.

    An in-memory table becomes the name of its type, without any data.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if hasattr(value, "to_json"):
            return value.to_json()
        fields = {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, set | frozenset):  # whose order differs between processes
        return sorted(map(to_json, value), key=repr)
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "__arrow_c_stream__") or hasattr(value, "column_names"):
        return type(value).__name__
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def flat(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Return (dotted name, value) for every value of a config from `to_json`."""
    if isinstance(config, dict):
        for key, value in config.items():
            yield from flat(value, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, config


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON cannot hold, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def now() -> str:
    """Return the time, to the second, with its time zone."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _numbered(runs: Path, recipe: str) -> dict[int, Path]:
    found = {}
    for path in runs.glob(f"{recipe}-*"):
        number = path.name.removeprefix(f"{recipe}-")
        if number.isdigit():
            found[int(number)] = path
    return found


def _last(runs: Path, recipe: str) -> Path | None:
    found = {n: path for n, path in _numbered(runs, recipe).items() if (path / CONFIG).is_file()}
    return found[max(found)] if found else None


def _next(runs: Path, recipe: str) -> RunFolder:
    runs.mkdir(parents=True, exist_ok=True)
    number = max(_numbered(runs, recipe), default=0) + 1
    while True:
        path = runs / f"{recipe}-{number:03d}"
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return RunFolder(path)
