# %% [markdown]
# # From training to inference: quantised tables
#
# Once a model is trained its tables are only read. Then a number of a row needs no 32 bits: with a scale and
# a bias for each row 8, 4, even 2 will do. This tutorial trains a DLRM, quantises it in several ways,
# compares sizes, errors, AUC and speed, lets a budget choose the precision of each table, and spreads the
# result over devices.

# %%
import copy
import time

import torch
from torch import nn

import meshrec
from meshrec import DataType
from meshrec.data import synthetic_clicks
from meshrec.metrics import area_under_curve
from meshrec.models import DLRM
from meshrec.ops import nbit
from meshrec.optim import RowWiseAdagrad
from meshrec.quant import choose_precision, quantize, table_bytes

torch.set_num_threads(1)
torch.manual_seed(0)
NUM_ROWS, DIM = 2000, 32

# %% [markdown]
# ## A trained model
#
# Clicks of a planted teacher: which ids are liked is known to nobody but the data. The tables update
# themselves in the backward pass.

# %%
clicks = synthetic_clicks(
    num_samples=160_000, num_validation=40_000, num_test=0, num_embeddings=NUM_ROWS, exponent=1.05
)
tables = meshrec.EmbeddingBagCollection(
    [
        meshrec.EmbeddingBagConfig(
            name=f"t{key}", embedding_dim=DIM, num_embeddings=NUM_ROWS, feature_names=[f"f{key}"]
        )
        for key in range(4)
    ]
)
model = DLRM(tables, 4, [32, DIM], [64, 1])
meshrec.fuse(model, optimizer=RowWiseAdagrad(lr=0.1))
dense = [parameter for name, parameter in model.named_parameters() if "embedding_bags" not in name]
optimizer = torch.optim.Adam(dense, lr=3e-3)
for step, batch in enumerate(clicks.train.batches(2048)):
    logits = model(batch.dense, batch.sparse).squeeze(1)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step:2d}  loss {loss.item():.4f}")

validation = list(clicks.validation.batches(8192))
labels = torch.cat([batch.labels for batch in validation])


@torch.no_grad()
def logits_of(scored: nn.Module) -> torch.Tensor:
    return torch.cat([scored(batch.dense, batch.sparse).squeeze(1) for batch in validation])


auc = area_under_curve(logits_of(model), labels)
print(f"AUC {auc:.4f}, of the teacher's own probabilities {clicks.best_auc:.4f}")

# %% [markdown]
# ## Quantised in one call
#
# `quantize` gives a copy with the same modules and other rows; the model itself stays as it is. Four bits
# with `rounding="search"` have the range of each row chosen such that its squared error is least.

# %%
WAYS = {
    "fp16": {"weights": DataType.FP16},
    "int8": {"weights": DataType.INT8},
    "int4": {"weights": DataType.INT4},
    "int4, search": {"weights": DataType.INT4, "rounding": "search"},
    "int2, search": {"weights": DataType.INT2, "rounding": "search"},
}
numbers = {config.name: weight.detach() for config, weight in tables.tables().values()}


def squared_error(small: nn.Module) -> float:
    """Return the squared error of all rows, relative to their squares."""
    error = total = 0.0
    for module in small.modules():
        if isinstance(module, meshrec.EmbeddingBagCollection):
            for config, rows in module.tables().values():
                before, bits = numbers[config.name], config.data_type.bits
                after = nbit.dequantize(rows, bits, DIM) if bits else rows.float()
                error += float((after - before).square().sum())
                total += float(before.square().sum())
    return error / total


found = {"fp32": (sum(table_bytes(model).values()), 0.0, 0.0)}
for name, options in WAYS.items():
    small = quantize(model, output_dtype=DataType.FP32, **options)
    moved = area_under_curve(logits_of(small), labels) - auc
    found[name] = (sum(table_bytes(small).values()), squared_error(small), moved)
for name, (size, error, moved) in found.items():
    print(f"{name:13s} {size:9,} bytes  squared error {error:.1e}  AUC {moved:+.1e}")

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
names = list(found)
axes[0].barh(names, [size / 1024 for size, _, _ in found.values()], color="#3b6ea8")
axes[0].set_xlabel("KiB of the tables")
axes[1].barh(names, [abs(moved) for _, _, moved in found.values()], color="#e0893c")
axes[1].set_xscale("symlog", linthresh=1e-6)
axes[1].set_xlabel("AUC: how far it moves")
axes[1].set_yticks([])
for each in axes:
    each.invert_yaxis()
    for side in ("top", "right"):
        each.spines[side].set_visible(False)
figure.savefig("precisions.svg")

# %% [markdown]
# ![Bytes of the tables, and how far the AUC moves](precisions.svg)
#
# Eight bits take {{ f"{found['int8'][0] / found['fp32'][0]:.0%}" }} of the bytes and move the AUC by
# {{ f"{abs(found['int8'][2]):.0e}" }}. The search reduces the squared error of four bits to
# {{ f"{found['int4, search'][1] / found['int4'][1]:.2f}" }} of the error without
# the search, at the same bytes.
#
# ## Faster, too
#
# A lookup waits for memory, and fewer bytes come sooner. Tables this small lie in the caches; larger ones
# show it.

# %%
BAG, BATCH, LARGE = 20, 2048, 400_000
large = meshrec.EmbeddingBagCollection(
    [meshrec.EmbeddingBagConfig(name="large", embedding_dim=64, num_embeddings=LARGE, feature_names=["f"])]
)
batches = [
    meshrec.KeyedJaggedTensor(
        ["f"], torch.randint(0, LARGE, (BAG * BATCH,)), lengths=torch.full((BATCH,), BAG)
    )
    for _ in range(10)
]


@torch.inference_mode()
def milliseconds(collection: nn.Module) -> float:
    """Return the milliseconds of a lookup: the best of some rounds, with other IDs in each lookup."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for features in batches:
            collection(features).values()
        times.append((time.perf_counter() - start) / len(batches))
    return 1e3 * min(times)


speeds = {"fp32": milliseconds(large)}
for data_type in (DataType.INT8, DataType.INT4, DataType.INT2):
    speeds[str(data_type)] = milliseconds(quantize(large, data_type))
for name, each in speeds.items():
    print(f"{name:5s} {each:.2f} ms for {BAG * BATCH:,} rows")

# %% [markdown]
# ## A precision for each table, by a budget
#
# How small is too small? `choose_precision` measures each table alone and looks for the fewest bytes such
# that, with a confidence of 95 %, the loss rises by less than a budget: here a tenth of a per cent. `meshrec
# quantize RUN --max-loss 0.1%` does the same for a training run.


# %%
def losses(scored: nn.Module) -> torch.Tensor:
    """Return the scores of all validation samples."""
    return nn.functional.binary_cross_entropy_with_logits(logits_of(scored), labels, reduction="none")


choice = choose_precision(model, losses, max_loss=1e-3)
chosen = quantize(model, per_table=choice.types, output_dtype=DataType.FP32, rounding="search")
print({table: str(data_type) for table, data_type in choice.types.items()})
print(f"{sum(table_bytes(chosen).values()):,} bytes, the loss rises by less than {choice.rise.bound:.3%}")

# %% [markdown]
# ## Over several devices
#
# The result is sharded as any model is: over ranks, or, for serving, over the devices of one process. Here
# both "devices" are the CPU; on a host with GPUs they would be `cuda:0` and `cuda:1`. Columns of a split row
# keep the scale and the bias of the whole row, so that the numbers do not depend on the plan.

# %%
from meshrec.distributed import (
    ShardingEnv,
    ShardingPlan,
    column_wise,
    construct_module_sharding_plan,
    table_wise,
)
from meshrec.model_parallel import DistributedModelParallel

int8 = quantize(model, DataType.INT8)
expected = logits_of(int8)
collection = int8.sparse_arch.embedding_bag_collection
plan = construct_module_sharding_plan(
    collection,
    {
        "t0": table_wise(rank=0),
        "t1": table_wise(rank=1),
        "t2": column_wise(ranks=[0, 1]),
        "t3": column_wise(ranks=[1, 0]),
    },
    world_size=2,
)
spread = DistributedModelParallel(
    copy.deepcopy(int8),
    env=ShardingEnv.from_local(["cpu", "cpu"]),
    plan=ShardingPlan({"sparse_arch.embedding_bag_collection": plan}),
)
print("bit by bit the same:", torch.equal(logits_of(spread), expected))
assert torch.equal(logits_of(spread), expected)

# %% [markdown]
# Saved by `meshrec.checkpoint.save`, it loads under any other plan, and `meshrec quantize` makes the same
# from a training run.
#
# Next: [models in stages](6_stages.md).
