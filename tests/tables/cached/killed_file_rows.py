"""A program whose training is killed again and again: prints how often, and whether the end is that of a run
that was left alone. Its arguments: a folder, the number of kills, a seed, and the kind of tables (fixed or
hashed).
"""

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from file_tables import KINDS, same, whole

from meshrec import checkpoint

STEPS, EVERY = 60, 4
tables = KINDS[sys.argv[4]]


def live(folder: Path, pace: float) -> None:
    """Go on from the last checkpoint, to the end."""
    model = tables.alone(folder / "rows", spec="adam", cached=60)
    state = {"model": model, "tables": model.fused_optimizer}
    saved = sorted(folder.glob("saved-*/manifest.json"))
    step = 0
    if saved:
        checkpoint.load(saved[-1].parent, state)
        step = int(saved[-1].parent.name.removeprefix("saved-"))
    pending = None
    for number in range(step, STEPS):
        tables.train(model, [number])
        time.sleep(pace)
        if (number + 1) % EVERY == 0:
            if pending is not None:
                pending.wait()
            pending = checkpoint.async_save(folder / f"saved-{number + 1:04d}", state)
    if pending is not None:
        pending.wait()
    torch.save(whole(model), folder / "end.part")
    os.replace(folder / "end.part", folder / "end")


def forked(folder: Path, pace: float, seconds: float | None) -> bool:
    """Live in a process of its own, which is killed after some seconds; return whether it was."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            live(folder, pace)
            code = 0
        finally:
            os._exit(code)
    begin = time.monotonic()
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            if status != 0:
                raise SystemExit(f"a life ended with status {status}")
            return False
        if seconds is not None and time.monotonic() - begin > seconds:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return True
        time.sleep(0.002)


def main() -> None:
    """Compare a run that is killed with one that is not."""
    torch.set_num_threads(1)
    folder, kills, draw = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    (folder / "calm").mkdir()
    forked(folder / "calm", 0, None)
    expected, done, turn = torch.load(folder / "calm" / "end"), 0, 0
    while done < kills:
        turn += 1
        killed = folder / f"killed-{turn}"
        killed.mkdir()
        while forked(killed, 0.005, draw.uniform(0.05, 0.8) if done < kills else None):
            done += 1
        found = torch.load(killed / "end")
        if not same(found, expected):
            raise SystemExit(f"after {done} kills the end is another one")
        left = [path.name for path in killed.glob("rows/*/*.log-*")]
        if left:
            raise SystemExit(f"logs of killed processes are left: {left}")
        shutil.rmtree(killed)
    print(f"{done} kills, {turn} runs")


if __name__ == "__main__":
    main()
