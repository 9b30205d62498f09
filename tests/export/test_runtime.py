import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from meshrec.export import Predictor, library_path
from tests.export.conftest import FEATURES

SOURCE = Path(__file__).parents[2] / "csrc" / "runtime"
pytestmark = pytest.mark.skipif(
    shutil.which("cmake") is None or not Path(library_path()).exists(), reason="needs CMake and the kernels"
)


def call(*command, **options):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)


@pytest.fixture(scope="session")
def program(made_once):
    """meshrec-predict, built and installed as its CMakeLists.txt says, and a program of a user's own."""
    options = [f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}", f"-DMESHREC_LIBRARY={library_path()}"]
    options.append("-DCMAKE_CXX_FLAGS_RELEASE=-O0")  # to compile takes longer than what it computes here

    def make(folder):
        call("cmake", "-S", SOURCE, "-B", folder / "build", *options, check=True)
        call("cmake", "--build", folder / "build", check=True)
        call("cmake", "--install", folder / "build", "--prefix", folder / "place", check=True)

    return made_once("runtime", make) / "place" / "bin" / "meshrec-predict"


def lines_of(dense, values, lengths):
    at = dict.fromkeys(values, 0)
    lines = []
    for sample in range(len(dense)):
        parts = [" ".join(repr(float(value)) for value in dense[sample])]
        for feature in FEATURES:
            count = int(lengths[feature][sample])
            parts.append(" ".join(map(str, values[feature][at[feature] : at[feature] + count].tolist())))
            at[feature] += count
        lines.append(" | ".join(parts) + "\n")
    return "".join(lines)


@pytest.mark.parametrize("batch", [0, 1, 2, 7, 2048])
def test_cpp_gives_the_bits_of_python(program, package, requests, batch):
    request = requests(batch)
    done = call(program, package, input=lines_of(*request), check=True)
    scores = torch.tensor([float(line) for line in done.stdout.split()])
    assert torch.equal(scores, Predictor(package)(*request))


def test_cpp_gives_the_bits_of_python_for_quantised_tables(program, small_package, requests):
    request = requests(300)
    done = call(program, small_package, input=lines_of(*request), check=True)
    scores = torch.tensor([float(line) for line in done.stdout.split()])
    assert torch.equal(scores, Predictor(small_package)(*request))


def test_no_python_is_loaded(program):
    assert "libpython" not in call("ldd", program, check=True).stdout


def test_bad_requests_and_packages_are_named(program, package, tmp_path):
    cases = {
        "1 2 3 | | | \n": "line 1: needs 4 dense values before the first bar",
        "1 2 3 4 | 1 | 2\n": "line 1: has no ids of feature 'f2'",
        "1 2 3 4 | 1 | x | \n": "line 1: an id of feature 'f 1' is no whole number",
        "1 2 3 4 | | | \n1 2 3 4 | 1 | 50 | 3\n": "id 50 of feature 'f 1' (sample 1) is outside [0, 50)",
    }
    for text, message in cases.items():
        done = call(program, package, input=text)
        assert done.returncode == 1
        assert message in done.stderr
    assert "is no package of this version" in call(program, tmp_path).stderr
    shutil.copytree(package, tmp_path / "other")
    layout = (tmp_path / "other" / "layout.txt").read_text()
    for word, other in (("torch", "torch 1.0"), ("isa", "isa NONE")):
        lines = [other if line.startswith(f"{word} ") else line for line in layout.splitlines()]
        (tmp_path / "other" / "layout.txt").write_text("\n".join(lines) + "\n")
        said = call(program, tmp_path / "other", input="").stderr
        assert "holds a program for" in said
        assert "compile the package anew: meshrec export " in said
