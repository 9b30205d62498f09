"""One life of one rank in test_kills.py: loads, trains and saves to the end, unless it is killed."""

import random
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from meshrec.checkpoint import CheckpointManager

WORLD_SIZE = 2


def live(rank, folder, store, phases, num_steps):
    """``phases``: where this rank tells what it is at."""
    sys.path.insert(0, str(Path(__file__).parent))
    import models

    random.seed(0)

    torch.set_num_threads(1)
    group_store = dist.FileStore(str(store), WORLD_SIZE)
    dist.init_process_group(
        "gloo", store=group_store, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=60)
    )
    model, optimizer = models.make("mix", "adam", hashed=True)
    checkpoints = CheckpointManager(folder, keep_last=2)
    state = models.state_of(model, optimizer)
    phases[rank] = b"l"
    first = checkpoints.load_latest(state) or 0
    for step in range(first, num_steps):
        phases[rank] = b"t"
        models.train(model, optimizer, [step], hashed=True)
        if step % 3 == 0:
            phases[rank] = b"s"
            if step % 2:
                checkpoints.save(step + 1, state)
            else:
                checkpoints.async_save(step + 1, state)
    checkpoints.wait()
    checkpoints.save(num_steps, state)
    dist.destroy_process_group()


if __name__ == "__life__":
    live(RANK, FOLDER, STORE, PHASES, NUM_STEPS)  # noqa: F821 - test_kills.py sets them
