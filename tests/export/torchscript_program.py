"""A C++ program, compiled with torch's headers and libraries alone, that runs TorchScript files."""

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.cpp_extension import include_paths, library_paths

from meshrec.export import library_path

SOURCE = Path(__file__).with_name("run_torchscript.cpp")


@pytest.fixture(scope="session")
def run_in_cpp(
    made_once: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Tensor]:
    """``run_in_cpp(file, inputs)``: the result of a TorchScript file in a program without Python."""
    compiler = shutil.which("c++")
    if compiler is None or not Path(library_path()).exists():
        pytest.skip("needs a C++ compiler and the kernels")

    def make(folder: Path) -> None:
        folder.mkdir()
        options = ["-std=c++20", "-O0", *(f"-I{path}" for path in include_paths())]
        for path in library_paths():
            options += [f"-L{path}", f"-Wl,-rpath,{path}"]
        libraries = ["-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
        subprocess.run([compiler, SOURCE, "-o", folder / "program", *options, *libraries], check=True)

    program = made_once("run_torchscript", make) / "program"
    assert "libpython" not in subprocess.run(["ldd", program], capture_output=True, text=True).stdout

    def run(file: Path, inputs: Sequence[Tensor]) -> Tensor:
        folder = tmp_path_factory.mktemp("run_in_cpp")
        torch.save(tuple(inputs), folder / "inputs.pt")
        command = [program, library_path(), file, folder / "inputs.pt", folder / "output.pt"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        result: Tensor = torch.load(folder / "output.pt")
        return result

    return run
