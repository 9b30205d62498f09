"""Find a Python with torch for CUDA, and run every check of the GPU path with it: `python -m benchmarks.gpu`.

Needs the standard library only, downloads nothing, and compiles nothing. It ends after eight minutes at most,
with a summary that also lists what was not run. Exit status: 0 when every check passed, 1 when one failed,
2 when there is no CUDA device to check.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
MINUTES = 8.0
OLDEST_TORCH = (2, 10)
ASK = """
import importlib.util, json, torch
found = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "devices": [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())] if found else [],
    "has": [name for name in ("triton", "pytest", "fbgemm_gpu") if importlib.util.find_spec(name)],
}))
"""


class Found(NamedTuple):
    """The torch and the devices that a Python interpreter reported, or why it cannot be used."""

    python: str
    problem: str | None
    """The reason why it cannot check a GPU; None if it can."""
    torch: str = ""
    devices: tuple[str, ...] = ()
    has: tuple[str, ...] = ()


class Outcome(NamedTuple):
    check: str
    status: str
    """"passed", "failed" or "not run"."""
    detail: str = ""


def pythons() -> list[str]:
    """Return the interpreters to ask, the most wanted first."""
    named = os.environ.get("GPU_PYTHON")
    if named:
        return [named]
    wanted = [ROOT / ".venv" / "bin" / "python", shutil.which("python3"), shutil.which("python")]
    if prefix := os.environ.get("CONDA_PREFIX") or os.environ.get("VIRTUAL_ENV"):
        wanted.insert(0, Path(prefix) / "bin" / "python")
    existing = [str(each) for each in (*wanted, sys.executable) if each and Path(each).exists()]
    return list(dict.fromkeys(existing))


def ask(python: str) -> Found:
    """Ask an interpreter for its torch and its devices."""
    try:
        done = subprocess.run([python, "-c", ASK], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Found(python, f"does not run: {error}")
    if done.returncode:
        return Found(python, f"has no torch: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    told = json.loads(done.stdout)
    version = tuple(int(part) for part in told["torch"].split("+")[0].split(".")[:2])
    problem = None
    if told["cuda"] is None:
        problem = f"torch {told['torch']} is built without CUDA"
    elif not told["devices"]:
        problem = f"torch {told['torch']} for CUDA {told['cuda']} sees no device"
    elif version < OLDEST_TORCH:
        problem = f"torch {told['torch']} is older than {'.'.join(map(str, OLDEST_TORCH))}"
    elif "triton" not in told["has"]:
        problem = f"torch {told['torch']} has no Triton beside it, which the kernels are written in"
    return Found(python, problem, told["torch"], tuple(told["devices"]), tuple(told["has"]))


def commands(found: Found) -> list[tuple[str, list[str], str | None]]:
    """Return the checks: name, command, and why it cannot run (None if it can)."""
    own = [found.python, "-m", "benchmarks.gpu.checks"]
    no_pytest = None if "pytest" in found.has else "pytest is not installed"
    # Only files with such tests: others import packages that a machine with a GPU may lack.
    files = [str(each) for each in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.gpu" in each.read_text()]
    return [
        ("every Triton kernel against naive", [*own, "kernels"], None),
        ("sharded modules on NCCL, one rank", [*own, "sharded"], None),
        ("the train pipeline and Staged on two streams", [*own, "pipelines"], None),
        ("memory bandwidth", [found.python, "-m", "benchmarks.gpu.bandwidth"], None),
        (
            "tests marked gpu",
            [found.python, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files],
            no_pytest,
        ),
    ]


def run(check: str, command: list[str], seconds: float) -> Outcome:
    """Run one check; what it prints is shown as it comes."""
    print(f"\n== {check}", flush=True)
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    started = time.monotonic()
    try:
        status = subprocess.run(command, cwd=ROOT, env=environment, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        return Outcome(check, "not run", f"stopped after {seconds:.0f} s, when the eight minutes were over")
    taken = f"{time.monotonic() - started:.0f} s"
    return Outcome(check, "failed" if status else "passed", f"exit status {status}" if status else taken)


def run_all(found: Found) -> list[Outcome]:
    deadline = time.monotonic() + 60 * MINUTES
    outcomes = []
    for check, command, problem in commands(found):
        left = deadline - time.monotonic()
        if problem is not None:
            outcomes.append(Outcome(check, "not run", problem))
        elif left < 5:
            outcomes.append(Outcome(check, "not run", "the eight minutes were over"))
        else:
            outcomes.append(run(check, command, left))
    if "fbgemm_gpu" not in found.has:
        outcomes.append(Outcome("FBGEMM beside ours", "not run", "fbgemm_gpu is not installed"))
    if len(found.devices) < 2:
        outcomes.append(Outcome("several ranks over NCCL", "not run", "one device was found"))
    return outcomes


def main() -> int:
    asked = []
    for python in pythons():
        asked.append(ask(python))
        if asked[-1].problem is None:
            break
    found = next((each for each in asked if each.problem is None), None)
    if found is None:
        print(
            "No CUDA device to check: nothing was run. What was looked for: a Python with torch 2.10 or later"
        )
        print("for CUDA, Triton, and a device that it sees. What was found:")
        for each in asked:
            print(f"  {each.python}: {each.problem}")
        print(
            "Set GPU_PYTHON to the interpreter of another environment, such as GPU_PYTHON=/path/bin/python."
        )
        return 2
    print(f"{found.python}: torch {found.torch} on {', '.join(found.devices)}")
    outcomes = run_all(found)
    print("\n== summary")
    for outcome in outcomes:
        print(f"{outcome.status:8} {outcome.check}: {outcome.detail}")
    return int(any(outcome.status == "failed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
