"""What the source archive holds, and what `constraints.txt` pins."""

import itertools
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.packaging.lock import UNLISTED, lines_of, normal

ROOT = Path(__file__).parents[2]
LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]


def test_the_source_archive_has_what_a_wheel_is_built_of_and_no_tests(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, source)
    for name in ("src", "csrc"):
        skip = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, source / name, ignore=skip)
    (source / "tests").mkdir()
    (source / "tests/test_stray.py").touch()
    (source / "csrc/stray.o").touch()
    environment = {**os.environ, "MESHREC_NO_KERNELS": "1"}
    setup = [sys.executable, "setup.py", "--quiet"]
    subprocess.run([*setup, "sdist", "--dist-dir", tmp_path], cwd=source, env=environment, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
        opened.extractall(tmp_path / "unpacked", filter="data")
    assert not [name for name in names if name.startswith("tests") or name.endswith(".o")]
    inside = {
        str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cpp", ".h", ".inl")
    }
    assert inside | {"constraints.txt", "src/meshrec/ops/schemas.inc", "src/meshrec/py.typed"} <= names
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    subprocess.run([*setup, "bdist_wheel", "-d", tmp_path], cwd=unpacked, env=environment, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = zipfile.ZipFile(wheel).namelist()
    assert "meshrec/ops/schemas.inc" in packed
    assert {name.split("/")[0].split("-")[0] for name in packed} == {"meshrec"}


def test_every_requirement_is_pinned_to_versions_that_it_allows():
    project = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {normal(pin.name): pin.specifier for pin in map(Requirement, LINES)}
    extras = project["optional-dependencies"].values()
    listed = itertools.chain(project["dependencies"], *extras)
    for wanted in map(Requirement, listed):
        if (name := normal(wanted.name)) not in UNLISTED:
            tested = [pin.version for pin in pins[name]]
            assert all(wanted.specifier.contains(version, prereleases=True) for version in tested), name


def test_versions_of_two_environments_make_a_range():
    environments = [
        [("A_b", "1.10", ">=3.8"), ("torch", "2.13.0+cpu", ""), ("pip", "1", "")],
        [("a-b", "1.9", ">=3.12"), ("nvidia-nccl", "2", "")],
    ]
    lines = [line for line in lines_of(environments) if not line.startswith("#")]
    assert lines == ['a-b>=1.9,<=1.10; python_version >= "3.12"', "torch==2.13.0"]
