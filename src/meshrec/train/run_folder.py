"""Run folders, ``runs/<name>/``: create and find them, and read and write their files and state."""

import contextlib
import dataclasses
import json
import math
import os
import re
import socket
import time
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple

from meshrec.durable import (
    PREFIX,
    CreatedPath,
    DamageError,
    Mark,
    mark,
    read_regular,
    release,
    remove_named,
    sealed,
    unlocked_marks,
    unsealed,
    write_durably,
)
from meshrec.durable.sealed import SEAL

# Names of files and folders in a run folder. They are part of the format: renaming one would hide the files
# of older runs.
CONFIG = "config.json"
PLAN = "plan.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
STATE = "state.json"
DELTAS = "deltas"
JOINED = "joined"
"""Subfolder for the labelled rows of a stream with labels that come later."""
FINAL = "final"
"""Subfolder for the refit on all rows, which is a run itself."""
RUNS = Path("runs")
"""Default folder with all run folders."""
# Age of lines to remove at which the file is rewritten, beyond the age that is kept.
_REWRITE_SECONDS = 86400
# Maximum size of a JSON file to read.
_MAX_BYTES = 1 << 28
_KINDS = ("run", "run in a folder of the user")
"""Kinds of marks, which prove that MeshRec uses a folder. The first: MeshRec created the folder, and deletes
it with the run. The second: the folder existed before, and was empty.
"""
# Files that exist at most once per run, as a pattern without groups: `FILES` contains it twice, also for
# temporary files.
_JSON = r"(?:(?:config|plan|summary|state|features|columns|launch|hold)\.json|features\.arrow)"
_RECIPE_FIELDS = {"name", "data", "model"}
"""Recipe fields in ``config.json`` that every release has written."""
FILES = re.compile(
    # Names that end in 16 hex digits are temporary files of `write_durably`, which a crash may leave. A file
    # named ".seen-" tests whether several hosts share the folder; see runs/host_folder.py.
    rf"{_JSON}|(?:metrics|phases|phases_whole|steps)\.jsonl|(?:plan|report)\.html|wandb_id\.txt"
    r"|trace_rank\d+\.json\.gz|error_rank\d+\.txt|log_rank\d+\.txt(?:\.1)?|\.process_rank\d+|\.lock|\.seen-[0-9a-f]{8}"
    rf"|events\.out\.tfevents\.\d+\..+|\.(?:{_JSON}|(?:metrics|phases|phases_whole|steps)\.jsonl)\.[0-9a-f]{{16}}"
)
"""Regular expression for the names of all files that a run writes into its folder. All other files belong to
the user, and are never deleted.
"""

StateName = Literal["running", "stopped", "failed", "finished"]


class RunState(NamedTuple):
    """Content of ``state.json``.

    Attributes:
        name: ``running``, ``stopped``, ``failed`` or ``finished``.
        error: a failed run's error message.
        step: last step known; None: unknown.
    """

    name: StateName
    error: str | None = None
    step: int | None = None


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """A run's folder: gives the paths of its files, and reads and writes the small files.

    Attributes:
        path: path of the folder.
        is_trusted: whether the user has allowed the run's source code to be executed; see [Note: whose code a
            run executes] in runs/source.py.
    """

    path: Path
    is_trusted: bool = False

    @property
    def name(self) -> str:
        """Run name; ``NAME/final`` for a refit on all rows."""
        # A user may call a run "final"; only a folder inside a run is a refit.
        is_final = self.path.name == FINAL and (self.path.parent / CONFIG).is_file()
        return f"{self.path.parent.name}/{FINAL}" if is_final else self.path.name

    @property
    def plan(self) -> Path:
        """Path to the sharding plan, in the format of `meshrec plan`."""
        return self.path / PLAN

    @property
    def plan_page(self) -> Path:
        """Path to the HTML page about the sharding plan."""
        return self.path / "plan.html"

    @property
    def report(self) -> Path:
        """Path to the run's HTML report."""
        return self.path / "report.html"

    @property
    def phases(self) -> Path:
        """Path to the file with the measured duration of every training step phase on every rank."""
        return self.path / "phases.jsonl"

    @property
    def whole_phases(self) -> Path:
        """Path to the file with phase durations in steps without overlap of communication and computation.

        A pipelined run measures such steps next to the overlapped steps in `phases`; see
        `meshrec.train.steps.PhaseTimes`. Other runs do not have this file.
        """
        return self.path / "phases_whole.jsonl"

    @property
    def steps(self) -> Path:
        """Path to the records of the steps since the last checkpoint, for streams with several partitions."""
        return self.path / "steps.jsonl"

    def discard(self, path: Path) -> None:
        """Delete a file in the run folder if it exists, such as the error of an earlier start."""
        remove_named(self.path, [path.name])

    def trace(self, rank: int) -> Path:
        """Return the path to a rank's profiler trace."""
        return self.path / f"trace_rank{rank}.json.gz"

    def error(self, rank: int) -> Path:
        """Return the path to the file with a rank's error and traceback."""
        return self.path / f"error_rank{rank}.txt"

    def log(self, rank: int) -> Path:
        """Return the path to a rank's log file."""
        return self.path / f"log_rank{rank}.txt"

    def process(self, rank: int) -> Path:
        """Return the path of the lock file with a rank's process ID, which exists while the rank runs."""
        return self.path / f".process_rank{rank}"

    @property
    def has_checkpoint(self) -> bool:
        """Whether the folder has a checkpoint from which training can continue."""
        return any(self.path.glob("checkpoints/step-*/manifest.json"))

    def write_json(self, name: str, value: Any, *, seal: bool = False) -> None:
        """Write a JSON file atomically: readers see either the old or the new content.

        NaN and infinity are written as null.

        Args:
            name: file name.
            value: plain values to write.
            seal: whether to add a checksum, for content on which the results of a run depend.
        """
        text = json.dumps(replace_nonfinite(value), indent=1, allow_nan=False) + "\n"
        if seal:
            # Parse the JSON again, so that keys are strings, as they are when the checksum is verified.
            text = sealed(json.loads(text)).decode()
        write_durably(self.path / name, text.encode())

    def write_state(self, name: StateName, *, error: str | None = None, step: int | None = None) -> None:
        """Write ``state.json``, with the state of the run and with this host and process ID.

        Args:
            name: the state.
            error: a failed run's error message.
            step: current step.
        """
        self.write_json(
            STATE,
            {
                "state": name,
                "error": error,
                "step": step,
                # By process ID and host, `state` detects a killed run, which could not write its end.
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "time": timestamp(),
            },
        )

    def state(self) -> RunState:
        """Read the state of the run.

        If the state is "running", but the run's process on this machine does not exist any more, return
        "failed".
        """
        # A killed process cannot write "failed", so "running" is checked against the process list.
        saved = self.read_json(STATE)
        if saved is None:  # written by an earlier release
            return RunState((self.read_json(SUMMARY) or {}).get("state", "failed"), None, None)
        # On other hosts, a process ID cannot be checked.
        lost = saved["host"] == socket.gethostname() and not _is_alive(saved["pid"])
        if saved["state"] == "running" and lost:
            return RunState(
                "failed", "it ended without an error: killed, or out of memory", self._last_step()
            )
        return RunState(saved["state"], saved["error"], saved["step"])

    def _last_step(self) -> int | None:
        """Return the last step in ``metrics.jsonl``, or None if it has no lines."""
        return max((line["step"] for line in self.metrics()), default=None)

    def read_json(self, name: str) -> Any:
        """Read a file written by `write_json`, or return None if it does not exist.

        Raises:
            ValueError: the file cannot be read, is damaged, or was changed without updating the checksum.
        """
        path = self.path / name
        try:
            return unsealed(read_regular(path, _MAX_BYTES), name, required=False)
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
        """Append a line with metrics to ``metrics.jsonl``."""
        # Not written durably: after a crash, readers skip a truncated line.
        with (self.path / METRICS).open("a") as file:
            file.write(json.dumps(replace_nonfinite(values), allow_nan=False) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """Read all lines in ``metrics.jsonl``, except truncated lines, which a crash may leave."""
        return _read_lines(self.path / METRICS)

    def remove_lines_after(self, step: int, *, evaluated: bool) -> None:
        """Remove metrics and phase times of steps after ``step``, which a resumed run will record again.

        Truncated and damaged lines are removed as well.

        Args:
            step: the step from which training continues.
            evaluated: whether the checkpoint includes the evaluation after ``step``. If not, the line of that
                evaluation is removed, because it will be recorded again.
        """
        # Last step to keep, by kind of line. Test lines are written at the end, so they are always removed.
        last = {"validation": step if evaluated else step - 1, "test": -1}
        for path in (self.path / METRICS, self.phases, self.whole_phases):
            if path.exists():
                retained = [
                    line for line in _read_lines(path) if line["step"] <= last.get(line.get("kind", ""), step)
                ]
                # Replaced as a whole, so that a crash leaves either the old or the new lines.
                write_durably(path, "".join(json.dumps(line) + "\n" for line in retained).encode())

    def remove_lines_before(self, seconds: float) -> None:
        """Remove metrics lines that are older than a time, unless the oldest line is hardly older.

        Args:
            seconds: time in seconds since 1970. Lines without the entry ``time`` are kept.
        """
        with contextlib.suppress(FileNotFoundError, ValueError), (self.path / METRICS).open() as file:
            # Rewriting takes time, so it is done once per day, and not at every call.
            if json.loads(file.readline()).get("time", math.inf) < seconds - _REWRITE_SECONDS:
                retained = [line for line in self.metrics() if line.get("time", seconds) >= seconds]
                text = "".join(json.dumps(line) + "\n" for line in retained)
                write_durably(self.path / METRICS, text.encode())


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the values in a JSON lines file, without damaged lines; empty if the file does not exist."""
    lines = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError):  # not JSON, or not UTF-8
                lines.append(json.loads(line))
    return lines


def new_run(name: str | None, recipe: str, runs: Path = RUNS, *, resume: bool = False) -> RunFolder:
    """Create the folder for a new run, or with ``resume``, find the folder of an existing run.

    Args:
        name: run name. None: the recipe's name with the next free number, or with ``resume``, with the last
            number.
        recipe: recipe name.
        runs: folder with all run folders.
        resume: whether to continue an existing run.

    Raises:
        ValueError: a new run's folder already contains a run or cannot be created, or the run to resume
            does not exist.
    """
    if name is not None and (Path(name).name != name or name in ("", "..")):
        raise ValueError(
            f"--name {name}: a run's name is the name of its folder in {runs}; --runs sets that folder."
        )
    if resume:
        path = runs / name if name is not None else _last_run(runs, recipe)
        if path is None or not is_run(path):
            subject = (
                f"{path.resolve()} has no run"
                if path is not None
                else f"{runs.resolve()} has no run of {recipe}"
            )
            names = ", ".join(run.path.name for run in all_runs(runs)) or "none"
            raise ValueError(
                f"{subject} to resume; leave out --resume, or name one with --name. There are: {names}."
            )
        return RunFolder(path)
    try:
        if name is None:
            return _create_next_run(runs, recipe)
        path = runs / name
        if (path / CONFIG).exists():
            raise ValueError(f"{path} has a run already; use another --name, or continue it with --resume.")
        if not make_folder(path):
            _check_unused(path)
    except OSError as error:
        raise ValueError(
            f"no folder for the run can be made in {runs}: {error}. Name another --runs."
        ) from error
    return RunFolder(path)


def make_folder(path: Path) -> bool:
    """Create a run folder, and in it a mark: a hidden file which proves that MeshRec created the folder.

    Returns:
        True if the folder was created. False if it existed already; then nothing is changed.

    Raises:
        OSError: the folder cannot be created, or the path is not a folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise
        return False
    # Remembered, so that only a folder that this call created is removed after a failure.
    created = CreatedPath.at(path)
    try:
        release(mark(path, _KINDS[0])[1])
    except BaseException:  # the disk is full
        created.remove()
        raise
    return True


def _check_unused(path: Path) -> None:
    """Check that an existing folder may be used for a new run, and mark it."""
    # Without a mark, names like those of a run's files prove nothing: they may be the user's own files.
    started = run_marks(path)
    ours = {run_mark.path.name for run_mark in started}
    user_files = sorted(
        name
        for name in os.listdir(path)
        if name not in ours and not (started and FILES.fullmatch(name)) and not name.startswith(PREFIX)
    )
    if user_files:
        some = ", ".join(user_files[:5]) + (", ..." if len(user_files) > 5 else "")
        raise ValueError(
            f"{path} is not a run, and holds {some}. Use another --name or --runs, or move its files away."
        )
    if not started:
        release(mark(path, _KINDS[1])[1])


def run_marks(path: Path) -> list[Mark]:
    """Return the marks in a folder. A mark is a hidden file by which MeshRec recognizes its run folders.

    The list is empty if no run has created or used the folder.
    """
    return [run_mark for kind in _KINDS for run_mark in unlocked_marks(path.resolve(), kind, moved=True)]


def created_folder(run: Mark) -> bool:
    """Return whether the run with this mark created its folder (True), or used an empty folder (False)."""
    return run.kind == _KINDS[0]


def is_run(path: Path) -> bool:
    """Return whether a folder is a run folder, and not another program's folder with a ``config.json``.

    Raises:
        ValueError: ``config.json`` is damaged.
    """
    if not (path / CONFIG).is_file():
        return False
    recipe = RunFolder(path).read_json(CONFIG).get("recipe")
    return bool(run_marks(path)) or (isinstance(recipe, dict) and recipe.keys() >= _RECIPE_FIELDS)


def find_run(name: str | Path, runs: Path = RUNS, *, trust: bool = False) -> RunFolder:
    """Find a run by name or path.

    Args:
        name: run name, or path of the run folder.
        runs: folder with all run folders.
        trust: whether the recipe's source code may be executed even if somebody else trained the run.

    Raises:
        ValueError: the run does not exist.
    """
    # A run name has precedence over a relative path.
    for path in (runs / name, Path(name)):
        if (path / CONFIG).is_file():
            return RunFolder(path, trust)
    names = ", ".join(run.path.name for run in all_runs(runs)) or "none"
    raise ValueError(
        f"there is no run {str(name)!r} in {runs.resolve()}; there are: {names}. --runs names another folder."
    )


def finished_refit(run: RunFolder) -> RunFolder | None:
    """Return the folder of a run's refit on all rows, or None if the run has no finished refit."""
    final = RunFolder(run.path / FINAL, run.is_trusted)
    if not (final.path / CONFIG).is_file() or final.state().name != "finished":
        return None
    return final


def reported_run(run: RunFolder) -> RunFolder:
    """Return the run's refit on all rows if it has a finished one, else the run itself."""
    return finished_refit(run) or run


def run_or_path(path: Path, runs: Path = RUNS) -> Path:
    """Interpret ``path`` as a path if it exists, else as a run name, and return the path.

    If neither exists, return ``path`` unchanged.
    """
    return runs / path if not path.exists() and (runs / path / CONFIG).is_file() else path


def all_runs(runs: Path = RUNS) -> list[RunFolder]:
    """Return all runs in a folder, oldest first."""
    paths = [path.parent for path in runs.glob(f"*/{CONFIG}")]
    return [RunFolder(path) for path in sorted(paths, key=lambda path: (path / CONFIG).stat().st_mtime)]


def to_json(value: Any) -> Any:
    """Convert a configuration object, such as a recipe, to plain JSON types.

    A dataclass becomes a dict with its class name as ``"type"``, unless it has a method ``to_json``. An
    in-memory table becomes the type name, without the data.
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
    # In-memory tables: Arrow, polars and pandas frames, and Hugging Face datasets.
    if hasattr(value, "__arrow_c_stream__") or hasattr(value, "column_names"):
        return type(value).__name__
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def flatten(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a pair (dotted name, value) for every value in the output of `to_json`.

    Example: ``{"model": {"layers": [8]}}`` gives ("model.layers", [8]).
    """
    if isinstance(config, dict):
        for key, value in config.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, config


def replace_nonfinite(value: Any) -> Any:
    """Replace NaN and infinity in nested values by None, because JSON cannot represent them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(item) for item in value]
    return value


def _is_alive(pid: int) -> bool:
    """Return whether a process exists on this machine."""
    try:
        # Signal 0 checks only for existence. If the system has reused the process ID, a lost run counts as
        # running.
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        return True
    return True


def timestamp() -> str:
    """Return the current time with time zone, such as "2026-01-31T12:00:00+0000"."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _runs_by_number(runs: Path, recipe: str) -> dict[int, Path]:
    """Return the paths in a folder that are named ``RECIPE-NUMBER``, by number."""
    by_number = {}
    for path in runs.glob(f"{recipe}-*"):
        number = path.name.removeprefix(f"{recipe}-")
        if number.isdigit():
            by_number[int(number)] = path
    return by_number


def _last_run(runs: Path, recipe: str) -> Path | None:
    """Return the path of the recipe's run with the highest number, or None without such a run."""
    by_number = {n: path for n, path in _runs_by_number(runs, recipe).items() if (path / CONFIG).is_file()}
    return by_number[max(by_number)] if by_number else None


def _create_next_run(runs: Path, recipe: str) -> RunFolder:
    """Create the folder ``RECIPE-NUMBER`` with the next free number, such as ``dlrm-004``."""
    runs.mkdir(parents=True, exist_ok=True)
    # Another process may choose the same number. The process that creates the folder gets it.
    number = max(_runs_by_number(runs, recipe), default=0) + 1
    while True:
        path = runs / f"{recipe}-{number:03d}"
        with contextlib.suppress(FileExistsError):  # a file has that name
            if make_folder(path):
                return RunFolder(path)
        number += 1
