# %% [markdown]
# # Data parallelism, and the dense side
#
# The tables of a recommender model are split; the dense rest (a few layers) is small, and every process has
# all of it. Keeping those copies equal is PyTorch's own job: `DistributedDataParallel`, DDP. This tutorial
# opens DDP up by hand: which messages it sends, when, and which work they overlap with. Then it does the
# same with `DistributedModelParallel`, which sets DDP up around the tables.

# %%
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import meshrec
from meshrec.distributed import EmbeddingBagCollectionSharder, ShardingEnv, leave_process_group
from meshrec.model_parallel import DistributedModelParallel
from meshrec.optim import RowWiseAdagrad

NUM_PROCESSES = 2

# %% [markdown]
# ## Starting processes by hand
#
# `spawn` starts functions of this script in new processes; each joins the process group, works, and saves
# its result. `leave_process_group` stands where `dist.destroy_process_group` would: it also sees to it that
# gloo's threads end before Python does.


# %%
def process(rank: int, work: Callable[[], object], folder: str) -> None:
    """Join the group, run ``work``, and save its result, in one process."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", NUM_PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_PROCESSES)
    torch.save(work(), f"{folder}/{rank}.pt")
    leave_process_group()


def on_all(work: Callable[[], object]) -> list:
    """Return the result of ``work`` on each process."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(process, (work, folder), nprocs=NUM_PROCESSES)
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(NUM_PROCESSES)]


# %% [markdown]
# ## What DDP broadcasts
#
# Every process builds the model with a different seed, so the copies differ. Wrapping it in DDP gives all
# processes the parameters and buffers of rank 0. After each backward pass the gradients are averages over
# all processes, so that equal optimizers take equal steps.


# %%
def dense_model() -> nn.Sequential:
    """Return a model of six layers of 512 x 512."""
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())])


def batch(seed: int) -> torch.Tensor:
    """Return a batch of 128 samples."""
    return torch.randn(128, 512, generator=torch.Generator().manual_seed(seed))


def wrap_and_step() -> dict[str, float]:
    """Sums over a weight before and after wrapping, and over its gradient."""
    torch.manual_seed(dist.get_rank())
    model = dense_model()
    before = model[0].weight.detach().double().abs().sum().item()
    wrapped = DistributedDataParallel(model)
    after = model[0].weight.detach().double().abs().sum().item()
    wrapped(batch(dist.get_rank())).square().mean().backward()
    return {"before": before, "after": after, "gradient": model[0].weight.grad.double().abs().sum().item()}


if __name__ == "__main__":
    sums = on_all(wrap_and_step)
    for rank, seen in enumerate(sums):
        print(f"rank {rank}:", {name: round(value, 4) for name, value in seen.items()})
    assert sums[0]["before"] != sums[1]["before"]
    assert sums[0]["after"] == sums[1]["after"] == sums[0]["before"]
    assert sums[0]["gradient"] == sums[1]["gradient"]

# %% [markdown]
# Rank 1 began with {{ round(sums[1]["before"], 1) }} and has rank 0's {{ round(sums[1]["after"], 1) }}
# since it was wrapped. The gradients are equal though the samples were not.
#
# ## Buckets, and their overlap with the backward pass
#
# DDP does not wait for the end of the backward pass. Parameters are put into *buckets*, last layers first;
# as soon as all gradients of a bucket are there, its all-reduce starts, while the backward pass continues
# with earlier layers. The profiler sees both.


# %%
def profiled_step() -> dict[str, object]:
    """Return the buckets of one step, and the events of its backward pass in microseconds."""
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(dense_model(), bucket_cap_mb=2)
    for step in range(3):  # the first steps find out in which order gradients arrive
        wrapped(batch(step)).square().mean().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        wrapped(batch(9)).square().mean().backward()
    spans = {
        kind: [(e.time_range.start, e.time_range.end) for e in profiler.events() if e.name == name]
        for kind, name in (("backward", "AddmmBackward0"), ("all-reduce", "gloo:all_reduce"))
    }
    sizes = wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return {"spans": spans, "bucket_bytes": [int(size) for size in sizes.split(", ")]}


if __name__ == "__main__":
    step = on_all(profiled_step)[0]
    for number, size in enumerate(step["bucket_bytes"]):
        print(f"bucket {number}: {size:,} bytes")
    backward, reduces = step["spans"]["backward"], step["spans"]["all-reduce"]
    end_of_backward = max(end for _, end in backward)
    started_early = sum(start < end_of_backward for start, _ in reduces)
    print(f"{started_early} of {len(reduces)} all-reduces started before the last layer's gradient was there")
    assert started_early > 0


# %%
def draw(path: str) -> None:
    """Draw the backward pass above, and the all-reduces below."""
    import matplotlib.pyplot as plt

    origin = min(start for spans in step["spans"].values() for start, _ in spans)
    figure, axes = plt.subplots(figsize=(8, 2), layout="constrained")
    for line, (kind, colour) in enumerate((("all-reduce", "#e0893c"), ("backward", "#3b6ea8"))):
        bars = [((start - origin) / 1000, (end - start) / 1000) for start, end in step["spans"][kind]]
        axes.broken_barh(bars, (line - 0.35, 0.7), facecolor=colour, edgecolor="white")
    axes.set_yticks([0, 1], ["all-reduce of a bucket", "backward of a layer"])
    axes.set_xlabel("milliseconds")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)


if __name__ == "__main__":
    draw("overlap.svg")

# %% [markdown]
# ![The backward pass and the all-reduces of one step](overlap.svg)
#
# The model's {{ f"{sum(step['bucket_bytes']):,}" }} bytes of gradients travel in
# {{ len(step["bucket_bytes"]) }} buckets, and {{ started_early }} of {{ len(reduces) }} all-reduces began
# while the backward pass was still at work. Small buckets start earlier, large ones move more efficiently:
# `bucket_cap_mb` is the knob.
#
# ## A model whose parts sit on several devices
#
# DDP can also wrap a model that is itself spread over devices, one set of devices for each process. Then it
# must not be told about devices: `device_ids` stays unset, and inputs and outputs are where the model's own
# code puts them. On a machine without GPUs both parts below are on the CPU; the code is the same.


# %%
class TwoParts(nn.Module):
    """Two layers, on separate devices."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.devices = first, second
        self.lower = nn.Linear(512, 64).to(first)
        self.upper = nn.Linear(64, 1).to(second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Move the activations to the second device; the parameters stay."""
        hidden = self.lower(x.to(self.devices[0])).relu()
        return self.upper(hidden.to(self.devices[1]))


def devices_of_this_process() -> list[torch.device]:
    """Return two GPUs for each process if there are enough, otherwise the CPU twice."""
    rank = dist.get_rank()
    if torch.cuda.device_count() >= 2 * NUM_PROCESSES:
        return [torch.device("cuda", 2 * rank), torch.device("cuda", 2 * rank + 1)]
    return [torch.device("cpu"), torch.device("cpu")]


def train_two_parts() -> list[float]:
    """Return the losses of a few steps on one batch."""
    torch.manual_seed(dist.get_rank())
    wrapped = DistributedDataParallel(TwoParts(*devices_of_this_process()))  # no device_ids
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (wrapped(batch(dist.get_rank())) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    curves = on_all(train_two_parts)
    for rank, losses in enumerate(curves):
        print(f"rank {rank}:", " ".join(f"{loss:.4f}" for loss in losses))
    assert all(losses[-1] < losses[0] for losses in curves)


# %% [markdown]
# ## The same with `DistributedModelParallel`
#
# A model with tables must not go into DDP as it is: DDP would all-reduce whole tables.
# `DistributedModelParallel` shards the tables, tells DDP to leave them alone, and wraps the rest. All of
# DDP's knobs are reachable (`dense_options`), and so are its communication hooks: this one sends gradients
# as fp16, half the bytes.


# %%
class Ranker(nn.Module):
    """One table and a layer over it."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = meshrec.EmbeddingBagCollection(
            tables=[
                meshrec.EmbeddingBagConfig(
                    name="product", embedding_dim=32, num_embeddings=1000, feature_names=["product"]
                )
            ]
        )
        self.over = nn.Linear(32, 1)

    def forward(self, features: meshrec.KeyedJaggedTensor) -> torch.Tensor:
        """Return a score for each sample."""
        return self.over(self.tables(features).values()).squeeze(1)


def train_ranker(compress: bool) -> dict[str, object]:
    """Train ten steps; return the observations of DDP and the final parameters."""
    torch.manual_seed(0)
    model = DistributedModelParallel(
        Ranker(),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        sharders=[EmbeddingBagCollectionSharder(fused_params=RowWiseAdagrad(lr=0.05))],
        dense_options={"gradient_as_bucket_view": True, "static_graph": True},
    )
    if compress:
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.module.over.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(10):
        ids = torch.randint(0, 1000, (64,), generator=generator)
        features = meshrec.KeyedJaggedTensor(["product"], ids, lengths=torch.ones(64, dtype=torch.int64))
        optimizer.zero_grad()
        (model(features) - (ids % 2)).square().mean().backward()
        optimizer.step()
    return {"over": model.module.over.weight.detach(), "dense": [n for n, _ in model.named_parameters()]}


def train_exact() -> dict[str, object]:
    """Train with fp32 gradients."""
    return train_ranker(compress=False)


def train_compressed() -> dict[str, object]:
    """Train with fp16 gradients."""
    return train_ranker(compress=True)


if __name__ == "__main__":
    exact, compressed = on_all(train_exact), on_all(train_compressed)
    for name, runs in (("fp32", exact), ("fp16", compressed)):
        equal = torch.equal(runs[0]["over"], runs[1]["over"])
        print(f"{name}: the dense parameters of both processes are equal: {equal}")
        assert equal
    apart = ((exact[0]["over"] - compressed[0]["over"]).abs().max() / exact[0]["over"].abs().max()).item()
    print(f"fp16 gradients moved the result by {apart:.1e} of its size")

# %% [markdown]
# Both processes agree bit for bit either way; compressing the gradients changed the trained layer by
# {{ f"{apart:.1e}" }} of its size after ten steps. The table itself never went through DDP: its rows were
# updated in the backward pass, by the process that owns them.
