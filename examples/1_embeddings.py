# %% [markdown]
# # From `nn.Embedding` to an embedding collection
#
# A recommender model turns ids (a user, the products she looked at) into vectors. This tutorial starts with
# what plain PyTorch has for it, ends with tables that are sharded and update themselves in the backward
# pass, and shows each step's numbers on the way. It runs on a laptop, in one process.

# %%
import torch
import torch.distributed as dist
from torch import nn

import meshrec

torch.manual_seed(0)

# %% [markdown]
# ## Lookup and pooling in plain PyTorch
#
# `nn.Embedding` is a matrix; a lookup takes rows of it.

# %%
embedding = nn.Embedding(num_embeddings=8, embedding_dim=4)
ids = torch.tensor([1, 6, 1])
print(embedding(ids).shape, "equals the rows:", torch.equal(embedding(ids), embedding.weight[ids]))

# %% [markdown]
# A sample seldom has exactly one id. One user looked at products 1 and 6, the next at 3, 3 and 5.
# `nn.EmbeddingBag` takes all ids in one row, and `offsets` that say where each sample's *bag* begins, and
# sums (*pools*) the rows of a bag.

# %%
bag = nn.EmbeddingBag(num_embeddings=8, embedding_dim=4, mode="sum")
values = torch.tensor([1, 6, 3, 3, 5])
offsets = torch.tensor([0, 2])
pooled = bag(values, offsets)
by_hand = torch.stack([bag.weight[[1, 6]].sum(0), bag.weight[[3, 3, 5]].sum(0)])
print(pooled.shape, "equals the sums:", torch.allclose(pooled, by_hand))

# %% [markdown]
# ## A collection of tables
#
# A real model has dozens of such tables. `EmbeddingBagCollection` holds all of them, knows which feature is
# looked up in which table, and looks up everything in one call. Here: products and users, 4096 rows
# of 64 each.


# %%
def new_tables(device="cpu"):
    """Return a table of products and one of users."""
    return meshrec.EmbeddingBagCollection(
        device=torch.device(device),
        tables=[
            meshrec.EmbeddingBagConfig(
                name="product_table", embedding_dim=64, num_embeddings=4096, feature_names=["product"]
            ),
            meshrec.EmbeddingBagConfig(
                name="user_table", embedding_dim=64, num_embeddings=4096, feature_names=["user"]
            ),
        ],
    )


ebc = new_tables()
for name, parameter in ebc.named_parameters():
    print(f"{name:45} {list(parameter.shape)}")

# %% [markdown]
# ## Jagged tensors
#
# The input of a collection is *jagged*: bags of different lengths. `JaggedTensor` is the values with the
# lengths of the bags; the offsets are the running sum of the lengths, with a 0 in front.

# %%
lengths = torch.tensor([2, 3])
offsets_by_hand = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
jagged = meshrec.JaggedTensor(values=values, lengths=lengths)
print("by hand:", offsets_by_hand.tolist(), " by class:", jagged.offsets().tolist())
print(jagged)

# %% [markdown]
# A batch has several features, so its type is `KeyedJaggedTensor`: all values in one tensor, feature by
# feature, and a length for every (feature, sample). A batch of two samples: the first user is 101 and
# looked at products 101 and 202, the second is 404 and looked at 303, 606 and 7. It is printed by key and
# sample.

# %%
features = meshrec.KeyedJaggedTensor(
    keys=["product", "user"],
    values=torch.tensor([101, 202, 303, 606, 7, 101, 404]),
    lengths=torch.tensor([2, 3, 1, 1]),
)
print(features)
print("keys:", features.keys(), " samples:", features.stride(), " user:", features["user"].values().tolist())

# %% [markdown]
# The result is a `KeyedTensor`: one matrix with a row for each sample, and the columns of every feature by
# name.

# %%
with torch.no_grad():
    result = ebc(features)
    product = nn.functional.embedding_bag(
        features["product"].values(),
        ebc.embedding_bags["product_table"].weight,
        features["product"].offsets()[:-1],
        mode="sum",
    )
print("all:", list(result.values().shape), " product:", list(result["product"].shape))
print("equal to nn.EmbeddingBag, bit for bit:", torch.equal(result["product"], product))

# %% [markdown]
# The result has the shape `{{ list(result.values().shape) }}`: two samples, and
# {{ result["product"].shape[1] }} columns for each of the two features.
#
# ## A process group of one, a planner and a plan
#
# Everything distributed needs a process group. One process with gloo is a process group too, and takes the
# same path as a hundred: what follows is the program that a cluster would run.

# %%
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

from meshrec.planner import EmbeddingShardingPlanner, Topology

planner = EmbeddingShardingPlanner(topology=Topology(world_size=1, compute_device="cpu"), batch_size=2)
plan = planner.collective_plan(ebc)
print(plan)

# %% [markdown]
# With one rank there is little to choose: each table is one rectangle, all its rows and columns. The plan
# also says how good it is: a step's estimated time, and a lower bound that no plan of these tables can
# beat. Its gap is {{ f"{plan.gap:.1%}" }}.
#
# ## The sharded module, and the first fused optimizer
#
# A *sharder* turns a module into its sharded form. It also brings the optimizer of the tables: here exact
# row-wise Adagrad, which keeps one number of state for each row.

# %%
from meshrec.distributed import EmbeddingBagCollectionSharder, LazyAwaitable, leave_process_group
from meshrec.optim import RowWiseAdagrad

sharder = EmbeddingBagCollectionSharder(fused_params=RowWiseAdagrad(lr=0.02, eps=0.002))
sharded = sharder.shard(ebc, plan.plan[""])
print(sharded.fused_optimizer)

# %% [markdown]
# Programs written for TorchRec say the same with a dictionary and FBGEMM's enum. One added line makes those
# names lead here, and the sharder they get reads the dictionary. (Where TorchRec is installed, `force`
# prefers MeshRec.)

# %%
from meshrec.compat.torchrec import install

install(force=True)

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder as TorchRecsSharder

theirs = TorchRecsSharder(
    fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.02, "eps": 0.002}
)
print("the same optimizer:", theirs.optimizer == sharder.optimizer)

# %% [markdown]
# ## The result is on its way
#
# `forward` of a sharded module gives a `LazyAwaitable`: ids and embeddings travel between processes, and
# nobody waits for them before a value is used. Use it as the value, and it is the value.

# %%
lazy = sharded(features)
print("before use:", lazy)
print("used:      ", list(lazy.values().shape), type(lazy.wait()).__name__)

# %% [markdown]
# Write one yourself: it takes a function, and calls it once, when the value is first needed.


# %%
def read_slowly():
    print("(reading)")
    return torch.ones(3)


mine = LazyAwaitable(read_slowly)
print("nothing has been read yet")
print("sum:", (2 * mine[:2]).sum().item(), " again, without reading:", torch.add(mine, 1).tolist())

# %% [markdown]
# ## Anatomy of a forward pass
#
# `route` packs the IDs for the ranks that own their rows, and starts to exchange how many there are.
# `advance` runs the next stages: after `EXCHANGED` the IDs are on their way, after `ARRIVED` they are here.
# `look_up` runs one kernel over all rectangles of a rank, and starts to send the rows back to the requesting
# ranks. A pipeline calls these stages itself and computes something else in between; `forward` calls them in
# a row.

# %%
from meshrec.distributed.lookup_batch import Stage

tables = sharded.tables
batch = tables.route(features)  # the numbers of IDs are on their way
tables.advance(batch, Stage.EXCHANGED)  # the IDs are on their way
tables.advance(batch, Stage.ARRIVED)  # the IDs are here
looked_up = sharded.awaited(batch, tables.look_up(batch))  # the embeddings are on their way
print("the same as forward:", torch.equal(looked_up.values(), sharded(features).values()))

# %% [markdown]
# ## The backward pass is the update
#
# The tables' optimizer is *fused* into the backward pass: it updates the few rows that the batch touched,
# and no gradient of a table is ever stored. So the loss changes on the second forward pass, though nobody
# called `step()`.


# %%
def loss_of(module):
    return (1 - module(features).values()).square().mean()


first = loss_of(sharded)
first.backward()
second = loss_of(sharded)
print(f"first forward {first.item():.6f}, second forward {second.item():.6f}")

# %% [markdown]
# The loss went from {{ f"{first.item():.6f}" }} to {{ f"{second.item():.6f}" }}.
#
# ## The second way: an optimizer for each parameter
#
# `apply_optimizer_in_backward` records on parameters which optimizer is to update them, before the module
# is sharded: any `torch.optim` class that has a fused form, and a different one for each table if you like.
# Here plain SGD, for the products only.

# %%
from meshrec.optim import apply_optimizer_in_backward, in_backward_optimizer_filter

model = nn.ModuleDict({"tables": new_tables(), "over": nn.Linear(128, 1)})
products = model["tables"].embedding_bags["product_table"].parameters()
apply_optimizer_in_backward(torch.optim.SGD, products, {"lr": 0.5})
model["tables"] = EmbeddingBagCollectionSharder().shard(model["tables"], plan.plan[""])

before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
losses = []
for _ in range(2):
    loss = (1 - model["over"](model["tables"](features).values())).square().mean()
    losses.append(loss.item())
    loss.backward()
changed = [name for name, parameter in model.named_parameters() if not torch.equal(before[name], parameter)]
print(f"losses {losses[0]:.6f} -> {losses[1]:.6f}; changed without a step():", changed)

# %% [markdown]
# Only the products moved, and the loss with them, from {{ f"{losses[0]:.4f}" }} to
# {{ f"{losses[1]:.4f}" }}. Which parameters remain for an ordinary optimizer? A filter returns the
# parameters that no optimizer in the backward pass owns.

# %%
left_over = dict(in_backward_optimizer_filter(model.named_parameters()))
print("left over:", list(left_over))
optimizer = torch.optim.Adam(left_over.values(), lr=0.01)
optimizer.step()
leave_process_group()

# %% [markdown]
# The user table is among them: it was given no optimizer, so it has an ordinary gradient, and Adam may have
# it. No optimizer is invented here, and none is lost.
#
# Next: [sharding, type by type](2_sharding.md), with more than one process.
