"""Programs written for TorchRec, run on MeshRec by the bridge, give the numbers that TorchRec 1.8.0 gives.

The programs write what they find as JSON to the file that their first argument names. What TorchRec gives is
in ``recorded/``; where it is installed, it is asked again. To record anew after a program has changed:
``MESHREC_RECORD=1`` and this file's tests with the marker ``peers``.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HERE.parents[2] / "src"), "OMP_NUM_THREADS": "1"}
# These leave their process as they found it, and run in one, one after another.
PROGRAMS = ["defaults", "in_backward", "jagged", "jagged_operators", "keyed", "lookups", "models", "planning"]
ALL_OF_THEM = """
import runpy, sys
from pathlib import Path
programs, out, *names = sys.argv[1:]
for name in names:
    sys.argv = [name, str(Path(out) / f"{name}.json")]
    runpy.run_path(str(Path(programs) / f"{name}.py"), run_name="__main__")
"""
BRIDGED, ORIGINAL = ["-m", "meshrec.compat.torchrec", "--force"], ["-W", "ignore"]


def run(command: list[str], *arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, *command, *map(str, arguments)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def run_all(command: list[str], folder: Path) -> Path:
    script = folder / "all_of_them.py"
    script.write_text(ALL_OF_THEM)
    run(command, script, HERE / "programs", folder, *PROGRAMS)
    return folder


def run_sharded(command: list[str], folder: Path) -> Path:
    run(command, HERE / "programs" / "sharded.py", folder)
    return folder


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_all(BRIDGED, tmp_path_factory.mktemp("bridged"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torchrec", reason="`make parity` installs it")
    return run_all(ORIGINAL, tmp_path_factory.mktemp("original"))


@pytest.fixture(scope="module")
def our_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_sharded(BRIDGED, tmp_path_factory.mktemp("bridged"))


@pytest.fixture(scope="module")
def their_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torchrec", reason="`make parity` installs it")
    return run_sharded(ORIGINAL, tmp_path_factory.mktemp("original"))


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Numbers may differ by rounding, texts by spaces."""
    same = type(ours) is type(theirs)
    if same and isinstance(ours, dict) and list(ours) == list(theirs):
        for key in ours:
            yield from differences(ours[key], theirs[key], f"{path}.{key}")
    elif same and isinstance(ours, list) and len(ours) == len(theirs):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    elif same and isinstance(ours, float):
        if not math.isclose(ours, theirs, rel_tol=1e-5, abs_tol=1e-6):
            yield path, ours, theirs
    elif same and isinstance(ours, str):
        if squeezed(ours) != squeezed(theirs):
            yield path, ours, theirs
    elif not same or ours != theirs:
        yield path, ours, theirs


def squeezed(text: str) -> str:
    return "".join(text.split())


def recorded(name: str) -> Any:
    return json.loads((HERE / "recorded" / f"{name}.json").read_text())


def check_recording(name: str, found: Any) -> None:
    if os.environ.get("MESHREC_RECORD"):
        (HERE / "recorded" / f"{name}.json").write_text(json.dumps(found))
    assert list(differences(found, recorded(name))) == []


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_give_what_torchrec_gave(program: str, ours: Path) -> None:
    found = json.loads((ours / f"{program}.json").read_text())
    assert list(differences(found, recorded(program))) == []


def test_sharded_programs_give_what_torchrec_gave(our_ranks: Path) -> None:
    for name in ("sharded-1", "sharded-2"):
        found = json.loads((our_ranks / f"{name}.json").read_text())
        assert list(differences(found, recorded(name))) == [], name


@pytest.mark.peers
@pytest.mark.parametrize("program", PROGRAMS)
def test_torchrec_gives_what_is_recorded(program: str, theirs: Path) -> None:
    check_recording(program, json.loads((theirs / f"{program}.json").read_text()))


@pytest.mark.peers
def test_torchrec_gives_what_is_recorded_of_ranks(their_ranks: Path) -> None:
    for name in ("sharded-1", "sharded-2"):
        check_recording(name, json.loads((their_ranks / f"{name}.json").read_text()))


def test_differences_are_seen() -> None:
    assert list(differences({"a": [1.0, "x  y"]}, {"a": [1.0 + 1e-8, "x y"]})) == []
    assert list(differences([1.0, 2], [1.1, 2])) == [("[0]", 1.0, 1.1)]
    assert list(differences({"a": 1}, {"b": 1})) == [("", {"a": 1}, {"b": 1})]
    assert list(differences("xy", "xz")) == [("", "xy", "xz")]
    assert list(differences([1], [1.0])) == [("[0]", 1, 1.0)]
