"""The checks of `make gpu`, tried without a GPU."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import bandwidth

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_what_it_looked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GPU_PYTHON", sys.executable)
    assert gpu.main() == 2
    told = capsys.readouterr().out
    assert told.startswith("No CUDA device to check: nothing was run.")
    assert f"{sys.executable}: torch {torch.__version__}" in told
    monkeypatch.setenv("GPU_PYTHON", str(tmp_path / "python"))
    assert gpu.main() == 2
    assert "does not run" in capsys.readouterr().out


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(
    ("check", "found"),
    [
        ("kernels", "calls of 16 ops equal plain torch"),
        ("sharded", "equal unsharded ones"),
        ("pipelines", "two stages equal the whole model"),
    ],
)
def test_every_check_runs(run_code, check, found):
    code = "from benchmarks.gpu.checks import main; main()"
    done = run_code(code, check, "--device", "cpu", cwd=ROOT, TRITON_INTERPRET="1")
    assert found in done.stdout


def test_bandwidth_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bandwidth", "--device", "cpu"])
    bandwidth.main()
    told = capsys.readouterr().out
    assert "a copy moves" in told
    assert "meshrec" in told


def test_the_summary_names_what_was_not_run(monkeypatch, capsys):
    found = gpu.Found(sys.executable, None, "2.13.0", ("a card",), ("triton",))
    monkeypatch.setattr(gpu, "pythons", lambda: [sys.executable])
    monkeypatch.setattr(gpu, "ask", lambda _: found)
    passed = ("one that passes", [sys.executable, "-c", "pass"], None)
    failed = ("one that fails", [sys.executable, "-c", "raise SystemExit(3)"], None)
    monkeypatch.setattr(gpu, "commands", lambda _: [passed, failed, ("tests", [], "pytest is not installed")])
    assert gpu.main() == 1
    summary = capsys.readouterr().out.split("== summary")[1]
    assert "passed   one that passes" in summary
    assert "failed   one that fails: exit status 3" in summary
    assert "not run  tests: pytest is not installed" in summary
    assert "not run  FBGEMM beside ours" in summary
    monkeypatch.setattr(gpu, "MINUTES", 0.05)
    assert gpu.main() == 0
    assert "not run  one that passes: the eight minutes were over" in capsys.readouterr().out
