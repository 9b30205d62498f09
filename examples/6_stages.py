# %% [markdown]
# # Models in stages
#
# When a model is cut into parts on different devices, only one of them works at a time: the second waits for
# the first, and then the first for the second. This tutorial cuts a model by hand and sees that; feeds the
# batch in splits, so that both work at once; looks for the best number of splits; overlaps copies; and then
# lets `Staged` choose. "Devices" are threads of one core each here, so that everything runs anywhere; on GPUs
# they are `cuda:0` and `cuda:1`.

# %%
import copy
import statistics
import time

import torch
from torch import nn

from meshrec.stages import Staged, StageLink

torch.set_num_threads(1)
torch.manual_seed(0)


class Block(nn.Module):
    """A residual block: the output of two convolutions is added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, channels, 3, padding=1)
        self.two = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.two(torch.relu(self.one(x))))


model = nn.Sequential(*(Block(24) for _ in range(6)))
images = torch.randn(128, 24, 12, 12)


def seconds_of(model: nn.Module, repeats: int = 5) -> float:
    """Return the median seconds of some training steps."""
    found = []
    for _ in range(repeats + 1):
        model.zero_grad()
        start = time.perf_counter()
        model(images).square().mean().backward()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


# %% [markdown]
# ## Two devices, one of them idle
#
# The whole batch is one split: the second stage begins when the first is done, and backward it is the other
# way round. Two devices are not faster than one.

# %%
alone = seconds_of(copy.deepcopy(model))
halves = Staged(copy.deepcopy(model), cuts=["3"], split_size=len(images))
together = seconds_of(halves)
print(f"one device {1e3 * alone:.0f} ms, two devices {1e3 * together:.0f} ms")
print("busy:", [f"{share:.0%}" for share in halves.timeline.busy()])

# %% [markdown]
# ## The batch in splits
#
# With 8 splits the first stage starts the second split while the second stage has the first. The result
# is that of the whole batch, to rounding.

# %%
piped = Staged(copy.deepcopy(model), cuts=["3"], split_size=16)
torch.testing.assert_close(piped(images), model(images), rtol=1e-4, atol=1e-5)
print(f"two devices, 8 splits: {1e3 * seconds_of(piped):.0f} ms")
with open("timeline.svg", "w") as file:
    file.write(piped.timeline.svg(piped.stages))

# %% [markdown]
# ![Who computed what when; grey is waiting](timeline.svg)
#
# ## How many splits?
#
# Few splits leave a stage waiting at both ends of the batch; many make each operation small. Measured:

# %%
sizes = [64, 32, 16, 8, 4]
measured = {size: seconds_of(Staged(copy.deepcopy(model), cuts=["3"], split_size=size)) for size in sizes}
for size, seconds in measured.items():
    bar = "#" * round(40 * seconds / alone)
    print(f"{len(images) // size:3d} splits of {size:2d}: {1e3 * seconds:5.0f} ms  {bar}")

# %% [markdown]
# ## Copies during the work
#
# Values go from one device to the next over a link. A stage does not wait for the values that it sent: a
# carrier brings them over while the stage has its next split. This link takes as long as half of a split's
# forward pass.


# %%
class SlowLink(StageLink):
    """Takes some milliseconds, and no core."""

    def ready(self, value):
        return None

    def carry(self, value, ready, destination):
        time.sleep(alone / 8 / 2 / 3 / 2)
        return lambda: value


slow = Staged(copy.deepcopy(model), cuts=["3"], split_size=16, link=SlowLink())
print(f"8 splits {1e3 * seconds_of(piped):.0f} ms, with copies {1e3 * seconds_of(slow):.0f} ms")

# %% [markdown]
# ## The automatic way
#
# `cuts="auto"` and `split_size="auto"` measure every part of the model at several split sizes, try all cuts
# by dynamic programming, and say what no cut can beat.

# %%
auto = Staged(copy.deepcopy(model), num_stages=2)
seconds = seconds_of(auto)
choice = auto.choice
print("stages:", auto.stages)
print(f"{choice.num_splits} splits; predicted {1e3 * choice.seconds:.0f} ms, measured {1e3 * seconds:.0f} ms")
print(f"no cut takes less than {1e3 * choice.bound:.0f} ms (gap {choice.gap:.1%})")

# %% [markdown]
# ## Data parallelism around it, and stages on several ranks
#
# `DistributedDataParallel(Staged(...))` works as around any module: each process has its own stages, and
# gradients are averaged once per batch. Where stages are to be on different processes, `StagedOverRanks`
# takes a mesh: its `stage` axis has the stages, `replicate` copies of them, and `shard` the ranks over which
# the tables of a stage are split. See the page of the room `stages`.
