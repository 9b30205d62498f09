import os
import platform
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch

from meshrec.export import Predictor, library_path, read_private_key, sign_package
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


@pytest.mark.usefixtures("needs_compiled")
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
        said = call(program, "--no-verify", tmp_path / "other", input="").stderr
        assert "holds a program for" in said
        assert "compile the package anew: meshrec export " in said


@pytest.fixture
def copied(package, tmp_path):
    return shutil.copytree(package, tmp_path / "package")


def test_damaged_files_are_named_before_they_are_used(program, copied):
    for name in ("layout.txt", "weights.bin", "program.pt2", "digests.txt"):
        content = (copied / name).read_bytes()
        place = len(content) // 2
        for damaged in (
            content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :],
            content[:-1],
            b"",
        ):
            (copied / name).write_bytes(damaged)
            done = call(program, copied, input="")
            assert (done.returncode, name in done.stderr, "again" in done.stderr) == (1, True, True)
        (copied / name).write_bytes(content)
        assert call(program, copied, input="").returncode == 0
    (copied / "weights.bin").unlink()
    os.mkfifo(copied / "weights.bin")
    assert "cannot be read as a regular file" in call(program, copied, input="", timeout=60).stderr


def test_signatures_are_checked(program, copied, tmp_path):
    pytest.importorskip("cryptography", reason="needs the extra sign")
    if "built without OpenSSL" in call(program, "--require-signature", "x", copied, input="").stderr:
        pytest.skip("the library was built without OpenSSL")
    from tests.export.test_signing import write_key

    private, public = write_key(tmp_path, "ours")
    _, other = write_key(tmp_path, "other")

    def opened(key):
        done = call(program, "--require-signature", key, copied, input="")
        return done.stderr if done.returncode else "opened"

    assert "is not signed, and a signature is required" in opened(public)
    sign_package(copied, read_private_key(private))
    assert opened(public) == "opened"
    assert "was not made by the private key" in opened(other)
    assert "holds no ed25519 public key" in opened(private)
    assert "cannot be opened" in opened(tmp_path / "missing")
    for name in ("layout.txt", "weights.bin", "program.pt2", "signature.txt"):
        content = (copied / name).read_bytes()
        for place in (len(content) // 2, len(content) - 2):
            changed = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
            (copied / name).write_bytes(changed)
            expected = (
                "was not made by" if name == "signature.txt" else f"{name} is not the file that was signed"
            )
            assert expected in opened(public)
        (copied / name).write_bytes(content)


def waits_for_input(process):
    """Whether a program reads its standard input now: /proc names the system call, and its first argument."""
    call = Path(f"/proc/{process.pid}/syscall").read_text().split()
    read = {"x86_64": "0", "aarch64": "63"}[platform.machine()]
    return call[:2] == [read, "0x0"]


@pytest.mark.skipif(not os.path.exists("/proc/self/syscall"), reason="reads /proc")
@pytest.mark.parametrize("how", ["mapped", "copied"])
def test_a_file_that_is_cut_short_does_not_end_a_program(program, copied, requests, how):
    """The program opens the package first and then reads its standard input."""
    request = requests(7)
    options = [] if how == "mapped" else ["--copy-weights"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    before = Predictor(copied)(*request)
    with subprocess.Popen([program, *options, copied], text=True, **pipes) as process:
        while not waits_for_input(process):
            assert process.poll() is None
            time.sleep(0.01)
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert (str(copied / "weights.bin") in maps) == (how == "mapped")
        os.truncate(copied / "weights.bin", 0)
        scores, said = process.communicate(lines_of(*request))
    if how == "copied":
        assert torch.equal(torch.tensor([float(line) for line in scores.split()]), before)
    else:
        assert (process.returncode, "was cut short while it was in use" in said) == (1, True)
