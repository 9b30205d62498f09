"""Time of `import meshrec` beyond that of `import torch`."""

import importlib.util
import statistics
import subprocess
import sys

from benchmarks.harness import Bar, Effort, Result, table

CODE = """
import time, warnings, torch
warnings.simplefilter("ignore")
start = time.perf_counter()
import {package}
print(time.perf_counter() - start)
"""


def seconds_over_torch(package: str) -> float:
    """Return how long a new process takes to import ``package`` after torch."""
    command = [sys.executable, "-c", CODE.format(package=package)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def run(effort: Effort) -> Result:
    packages = [name for name in ("meshrec", "torchrec") if importlib.util.find_spec(name) is not None]
    rounds = [[seconds_over_torch(package) for package in packages] for _ in range(effort.rounds)]
    medians = {
        package: statistics.median(each)
        for package, each in zip(packages, zip(*rounds, strict=True), strict=True)
    }
    rows = [[f"import {package}", f"{seconds:.3f} s"] for package, seconds in medians.items()]
    print(table(["over import torch", "median"], rows), end="\n\n")
    bars = [
        Bar(name="import meshrec, over torch", figure=medians["meshrec"], asked=0.3, unit=" s", at_most=True)
    ]
    return Result(medians, bars)
