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
PROGRAMS = pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("in_backward", []),
        ("jagged", []),
        ("keyed", []),
        ("lookups", []),
        ("models", []),
        ("planning", []),
        ("sharded", ["1"]),
        ("sharded", ["2"]),
    ],
    ids=lambda value: "".join(value),
)


def run(command: list[str], program: str, arguments: list[str], folder: Path) -> Any:
    out = folder / "found.json"
    script = str(HERE / "programs" / f"{program}.py")
    done = subprocess.run(
        [sys.executable, *command, script, str(out), *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


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


def recording(program: str, arguments: list[str]) -> Path:
    return HERE / "recorded" / f"{'-'.join([program, *arguments])}.json"


@PROGRAMS
def test_programs_give_what_torchrec_gave(program: str, arguments: list[str], tmp_path: Path) -> None:
    found = run(["-m", "meshrec.compat.torchrec", "--force"], program, arguments, tmp_path)
    recorded = json.loads(recording(program, arguments).read_text())
    assert list(differences(found, recorded)) == []


@pytest.mark.peers
@PROGRAMS
def test_torchrec_gives_what_is_recorded(program: str, arguments: list[str], tmp_path: Path) -> None:
    pytest.importorskip("torchrec", reason="`make parity` installs it")
    found = run(["-W", "ignore"], program, arguments, tmp_path)
    path = recording(program, arguments)
    if os.environ.get("MESHREC_RECORD"):
        path.write_text(json.dumps(found))
    assert list(differences(found, json.loads(path.read_text()))) == []


def test_differences_are_seen() -> None:
    assert list(differences({"a": [1.0, "x  y"]}, {"a": [1.0 + 1e-8, "x y"]})) == []
    assert list(differences([1.0, 2], [1.1, 2])) == [("[0]", 1.0, 1.1)]
    assert list(differences({"a": 1}, {"b": 1})) == [("", {"a": 1}, {"b": 1})]
    assert list(differences("xy", "xz")) == [("", "xy", "xz")]
    assert list(differences([1], [1.0])) == [("[0]", 1, 1.0)]
