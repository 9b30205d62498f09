"""Weights that are mapped, or copied, and what happens to their file meanwhile."""

import os
import shutil

import pytest
import torch

from meshrec.durable import read_digests
from meshrec.export import PackageError, Predictor
from meshrec.export.manifest import WeightRecord
from meshrec.export.weights import Weights
from meshrec.ops.library import has_kernels
from tests.export.conftest import torchs_own_warnings

RECORDS = [WeightRecord("a", "float32", [2000, 64], 0), WeightRecord("b", "uint8", [3], 512_000)]
needs_kernels = pytest.mark.skipif(not has_kernels, reason="needs the kernels")


@pytest.fixture
def path(tmp_path):
    content = torch.randn(2000, 64).numpy().tobytes() + b"xyz"
    (tmp_path / "weights.bin").write_bytes(content + bytes(-len(content) % 4096))
    return tmp_path / "weights.bin"


@pytest.mark.parametrize("private", [False, True])
def test_tensors_are_those_of_the_file(path, private):
    weights = Weights(path, RECORDS, private=private)
    assert weights.tensors[0].shape == (2000, 64)
    assert bytes(weights.tensors[1].tolist()) == b"xyz"
    weights.tensors[1].fill_(7)
    assert path.read_bytes()[512_000:512_003] == b"xyz"
    weights.check()
    weights.check_changes()


@needs_kernels
def test_a_file_that_is_cut_short_is_told(path):
    weights, copy = Weights(path, RECORDS), Weights(path, RECORDS, private=True)
    before = copy.tensors[0].clone()
    os.truncate(path, 4096)
    assert float(weights.tensors[0].double().abs().sum()) < float(before.double().abs().sum())
    for _ in range(2):
        with pytest.raises(PackageError, match="516,096 bytes"):
            weights.check()
        os.truncate(path, 516_096)  # no longer what it was
    assert torch.equal(copy.tensors[0], before)
    copy.check_changes()


def test_a_file_that_is_replaced_stays_as_it_was(path):
    weights = Weights(path, RECORDS)
    before = weights.tensors[0].clone()
    path.unlink()
    path.write_bytes(b"other")
    assert torch.equal(weights.tensors[0], before)
    weights.check_changes()


def test_a_file_that_is_written_to_is_compared_again(uncompiled, tmp_path):
    shutil.copytree(uncompiled, tmp_path / "package")
    path = tmp_path / "package" / "weights.bin"
    with torchs_own_warnings():
        predictor = Predictor(tmp_path / "package")
    os.utime(path)
    predictor.check_weights()
    with path.open("r+b") as file:
        file.write(b"x")
    os.utime(path, ns=(1, 1))
    with pytest.raises(PackageError, match=r"weights.bin"):
        predictor.check_weights()


@needs_kernels
def test_scores_of_a_file_that_was_cut_short_are_refused(package, requests, tmp_path):
    shutil.copytree(package, tmp_path / "package")
    mapped = Predictor(tmp_path / "package")
    copied = Predictor(tmp_path / "package", copy_weights=True)
    before = mapped(*requests(7))
    os.truncate(tmp_path / "package" / "weights.bin", 0)
    with pytest.raises(PackageError, match="truncated"):
        mapped(*requests(7))
    assert torch.equal(copied(*requests(7)), before)


def test_a_copy_is_compared_itself(uncompiled, tmp_path):
    """The file changes between its verification and the copy."""
    shutil.copytree(uncompiled, tmp_path / "package")
    path = tmp_path / "package" / "weights.bin"
    digest = read_digests(tmp_path / "package")["weights.bin"]
    Weights(path, [], private=True, digest=digest)
    with path.open("r+b") as file:
        file.write(b"x")
    with pytest.raises(PackageError, match="changed"):
        Weights(path, [], private=True, digest=digest)


def test_programs_are_not_left_in_the_folder_for_temporary_files(package, small_package, requests, tmp_path):
    """After SIGKILL nobody would remove them."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(tmp_path)
    try:
        for folder in (package, small_package):  # the second one has two programs
            predictor = Predictor(folder)
            if os.path.exists("/proc/self/maps"):
                assert list(tmp_path.iterdir()) == []
            assert predictor(*requests(3)).shape == (3,)
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
