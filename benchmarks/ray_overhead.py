"""The step time of a run on Ray beside that of the same run under torchrun, in turns.

Both train the recipe of the step benchmark on ranks of this machine, with the same seed, plan and
batches. Their last losses are compared before their times. A step's time is the median over the lines of
metrics, without the first two. Beside it stands the CPU time of the ranks: what the step takes longer, but
the ranks do not work longer, is due to Ray's own processes on the same cores. Needs `meshrec[ray]`, and no
other load.

    python -m benchmarks.ray_overhead
"""

import argparse
import itertools
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import Bar, bars_table, table

_LOG_EVERY, _WARM_UP_LINES = 5, 2


class Trained(NamedTuple):
    """The result of a run: medians over its lines of metrics, and the last loss."""

    seconds: float
    """Seconds of a step."""
    cpu_seconds: float
    """CPU seconds of all ranks in a step."""
    loss: float


def train(launcher: str, folder: Path, steps: int, ranks: int) -> Trained:
    """Train under a launcher."""
    words = ["-m", "meshrec", "train", "dlrm_benchmark", "--quiet", "--out", str(folder), "--name", launcher]
    words += ["--training.max-steps", str(steps), "--training.log-every", str(_LOG_EVERY)]
    words += ["--training.phases-every", "0", "--no-checkpoints", "--data.num-validation", "4096"]
    words += ["--data.num-test", "4096"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    # Given no token, Ray would write one into the home folder.
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # By default, Ray's workers have niceness 15, so that other programs slow them more than torchrun's ranks.
    environment |= {"RAY_worker_niceness": "0"}
    if launcher == "ray":
        words += ["--on", "ray", "--num-workers", str(ranks)]
    else:
        words = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *words]
    done = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"the run under {launcher} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    lines = [json.loads(line) for line in (folder / launcher / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["kind"] == "train"]
    pairs = list(itertools.pairwise(lines))[_WARM_UP_LINES:]
    seconds, cpu_seconds = (
        statistics.median(after[name] - before[name] for before, after in pairs) / _LOG_EVERY
        for name in ("seconds", "cpu_seconds")
    )
    return Trained(seconds, cpu_seconds, lines[-1]["loss"])


def run(rounds: int, steps: int, ranks: int) -> str:
    """Train in turns, and return the step times and the bar as text."""
    seconds: dict[str, list[float]] = {"torchrun": [], "ray": []}
    rows, losses = [], set()
    for number in range(rounds):
        # Each goes first in turn, as the machine may change slowly.
        for launcher, found in list(seconds.items())[:: 1 - 2 * (number % 2)]:
            with tempfile.TemporaryDirectory() as folder:
                trained = train(launcher, Path(folder), steps, ranks)
            losses.add(trained.loss)
            found.append(trained.seconds)
            both = (trained.seconds, trained.cpu_seconds)
            rows.append([f"{number + 1}", launcher, *(f"{1e3 * each:.2f}" for each in both)])
    if len(losses) != 1:
        raise RuntimeError(f"the runs end with different losses: {sorted(losses)}. Find out why.")
    ratio = statistics.median(
        ray / other for ray, other in zip(seconds["ray"], seconds["torchrun"], strict=True)
    )
    bar = Bar(name="step on Ray over step under torchrun", figure=ratio, asked=1.02, at_most=True)
    return (
        f"{table(['round', 'launcher', 'step [ms]', 'CPU of the ranks [ms]'], rows)}\n\n{bars_table([bar])}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ranks", type=int, default=2, help="fewer than cores leave one for Ray's processes")
    arguments = parser.parse_args()
    print(run(arguments.rounds, arguments.steps, arguments.ranks))


if __name__ == "__main__":
    main()
