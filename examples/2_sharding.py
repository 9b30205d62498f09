# %% [markdown]
# # Sharding, type by type
#
# Two large tables and two small ones, sharded in every way there is: table-wise, row-wise, column-wise and
# data-parallel over two processes, then table-row-wise, table-column-wise and grid over two simulated nodes
# of two processes each. Each type comes with constraints, the planner's plan, a picture of the plan, and
# the bytes that a training step sends over the wire. At the end the same batch has gone through all types,
# and the results are the same.

# %%
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

import meshrec
from meshrec.distributed import (
    EmbeddingBagCollectionSharder,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
    leave_process_group,
    measure_traffic,
)
from meshrec.model_parallel import DistributedModelParallel
from meshrec.optim import RowWiseAdagrad
from meshrec.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

SIZES = {"large_0": 4096, "large_1": 4096, "small_0": 1024, "small_1": 1024}
DIM = 64
GLOBAL_BATCH = 64


# %% [markdown]
# ## The model and its input
#
# The tables are built on `meta`: they have shapes, but no memory. Each process will allocate only the
# rectangles that it owns. Weights are drawn by a counter-based generator from the seed, the table's name
# and the row, so that they start the same under every plan and on any number of processes.


# %%
def tables_on_meta() -> meshrec.EmbeddingBagCollection:
    """Return the four tables, with one feature each."""
    return meshrec.EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            meshrec.EmbeddingBagConfig(
                name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=[f"of_{name}"]
            )
            for name, rows in SIZES.items()
        ],
    )


def part_of_the_batch(rank: int, world_size: int) -> meshrec.KeyedJaggedTensor:
    """Return the samples of one process. The global batch does not depend on the number of processes."""
    generator = torch.Generator().manual_seed(7)
    num_samples = GLOBAL_BATCH // world_size
    mine = slice(rank * num_samples, (rank + 1) * num_samples)
    features = {}
    for name, rows in SIZES.items():
        lengths = torch.randint(0, 5, (GLOBAL_BATCH,), generator=generator)
        bags = torch.randint(0, rows, (int(lengths.sum()),), generator=generator).split(lengths.tolist())
        features[f"of_{name}"] = meshrec.JaggedTensor(torch.cat(bags[mine]), lengths=lengths[mine])
    return meshrec.KeyedJaggedTensor.from_jt_dict(features)


# %% [markdown]
# ## One process
#
# What every process runs. Two processes form a mesh with one axis, `shard`; four form two simulated nodes,
# with the axes `node` and `local`. The constraints leave the planner one sharding type; where each
# rectangle goes is its choice. Then `DistributedModelParallel` allocates and shards, a batch goes forward
# and backward, and the tables have learned.


# %%
def process(rank: int, world_size: int, sharding_type: ShardingType, folder: str) -> None:
    """Plan, shard and train one step on one rank, and save its observations."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    if world_size == 2:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))

    tables = tables_on_meta()
    sharders = [EmbeddingBagCollectionSharder(fused_params=RowWiseAdagrad(lr=0.02))]
    planner = EmbeddingShardingPlanner(
        topology=Topology.from_mesh(mesh),
        constraints={name: ParameterConstraints(sharding_types=[sharding_type]) for name in SIZES},
        batch_size=GLOBAL_BATCH // world_size,
    )
    plan = planner.collective_plan(tables, sharders, dist.group.WORLD)
    model = DistributedModelParallel(
        tables, env=ShardingEnv.from_mesh(mesh), plan=plan, sharders=sharders, dense=None
    )

    features = part_of_the_batch(rank, world_size)
    with measure_traffic() as bytes_sent:
        first = model(features).values()
        first.square().mean().backward()
    second = model(features).values()
    torch.save((first.detach(), second.detach(), dict(bytes_sent)), f"{folder}/rank_{rank}.pt")
    if rank == 0:
        plan.save(f"{folder}/plan.json")
    leave_process_group()


# %% [markdown]
# ## Starting the processes
#
# `spawn` starts them from this very script, with a file as their meeting point.


# %%
class Outcome:
    """Return the observations that the processes of one run saved."""

    def __init__(self, sharding_type: ShardingType, world_size: int) -> None:
        self.world_size = world_size
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(process, (world_size, sharding_type, folder), nprocs=world_size)
            saved = [torch.load(f"{folder}/rank_{rank}.pt") for rank in range(world_size)]
            self.plan = ShardingPlan.load(f"{folder}/plan.json")
        self.first = torch.cat([first for first, _, _ in saved])
        self.second = torch.cat([second for _, second, _ in saved])
        self.bytes_sent = {name: sum(sent.get(name, 0) for *_, sent in saved) for name in saved[0][2]}

    def rectangles(self, table: str) -> dict[int, list[tuple[tuple[int, int], tuple[int, int]]]]:
        """Rows and columns of a table's rectangles, by rank."""
        sharding = self.plan.plan[""][table]
        found: dict[int, list] = {}
        for shard in sharding.shards:
            found.setdefault(shard.placement.rank, []).append((shard.rows, shard.columns))
        return found


outcomes: dict[ShardingType, Outcome] = {}


def run(sharding_type: ShardingType, world_size: int) -> None:
    """Runs one sharding type and prints its plan."""
    outcomes[sharding_type] = Outcome(sharding_type, world_size)
    print(outcomes[sharding_type].plan)


# %% [markdown]
# ## Table-wise
#
# Whole tables on ranks. The planner balances: each rank gets one large table and one small one.

# %%
if __name__ == "__main__":
    run(ShardingType.TABLE_WISE, 2)

    of_rank = [
        sorted(t for t in SIZES if rank in outcomes[ShardingType.TABLE_WISE].rectangles(t)) for rank in (0, 1)
    ]
    assert [[name[:5] for name in names] for names in of_rank] == [["large", "small"]] * 2

# %% [markdown]
# Rank 0 holds {{ " and ".join(f"`{name}`" for name in of_rank[0]) }}, rank 1 holds
# {{ " and ".join(f"`{name}`" for name in of_rank[1]) }}. Cheap to route: an id goes to one rank, a pooled
# row comes back. But a table that exceeds one rank's memory cannot be placed, and one hot table makes one
# hot rank.
#
# ## Row-wise
#
# Every rank has an interval of every table's rows. An id goes to the rank that owns its row; each rank
# pools the rows it has, and the partial sums are added where the sample lives.

# %%
if __name__ == "__main__":
    run(ShardingType.ROW_WISE, 2)

    rows = {
        name: [r1 - r0 for (((r0, r1), _),) in outcomes[ShardingType.ROW_WISE].rectangles(name).values()]
        for name in SIZES
    }
    assert rows["large_0"] == [2048, 2048]
    assert rows["small_0"] == [512, 512]

# %% [markdown]
# {{ SIZES["large_0"] }} rows became {{ " + ".join(map(str, rows["large_0"])) }}, and {{ SIZES["small_0"] }}
# became {{ " + ".join(map(str, rows["small_0"])) }}. Any table fits on enough ranks, and the load is even
# if the ids are; the price is a row of partial sums from every rank for every bag.
#
# ## Column-wise
#
# Every rank has some columns of every row. All ids go to all ranks; each sends its part of the vector back.

# %%
if __name__ == "__main__":
    run(ShardingType.COLUMN_WISE, 2)

    columns = {
        name: [c1 - c0 for ((_, (c0, c1)),) in outcomes[ShardingType.COLUMN_WISE].rectangles(name).values()]
        for name in SIZES
    }
    assert columns["large_0"] == [32, 32]

# %% [markdown]
# {{ DIM }} columns became {{ " + ".join(map(str, columns["large_0"])) }}. The loads are the same whatever
# the ids are; ids travel twice, and very narrow columns look up slowly. Row-wise Adagrad needs the whole
# row's mean square: the two ranks add theirs up before they update, so that the numbers do not depend on
# the plan.
#
# ## Data-parallel
#
# Every rank has the whole table. The plan has no rectangles to show: there is no `sharding_spec`.

# %%
if __name__ == "__main__":
    run(ShardingType.DATA_PARALLEL, 2)

    specs = [p.sharding_spec for p in outcomes[ShardingType.DATA_PARALLEL].plan.plan[""].values()]
    assert specs == [None] * len(SIZES)
    print("sharding specs:", specs)

# %% [markdown]
# Lookups send nothing. The backward pass exchanges gradients: sparse ones, ids and rows, or the whole
# table's, whichever is fewer bytes. Right for small tables that every sample reads.
#
# ## Two nodes of two ranks
#
# Between nodes the network is slower than inside one. Three types know about nodes. **Table-row-wise**
# gives a table to a node, and splits its rows over the node's ranks: partial sums are added inside the
# node, and cross the network once.

# %%
if __name__ == "__main__":
    run(ShardingType.TABLE_ROW_WISE, 4)

    for name in SIZES:
        owners = sorted(outcomes[ShardingType.TABLE_ROW_WISE].rectangles(name))
        assert owners in ([0, 1], [2, 3]), "all rows of a table are on one node"

# %% [markdown]
# **Table-column-wise** gives a table to a node, and splits its columns over the node's ranks.

# %%
if __name__ == "__main__":
    run(ShardingType.TABLE_COLUMN_WISE, 4)

# %% [markdown]
# **Grid** splits the columns over nodes, and the rows of each column part over the ranks of its node.

# %%
if __name__ == "__main__":
    run(ShardingType.GRID_SHARD, 4)


# %% [markdown]
# ## The plans as pictures
#
# A plan is a list of rectangles, so it can be drawn: one row of pictures for each sharding type, one
# picture for each table, a colour for each rank.


# %%
def draw(path: str) -> None:
    """Draw all plans, one row each."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch, Rectangle

    colours = ["#3b6ea8", "#e0893c", "#4f9d69", "#b0568c"]
    figure, grid = plt.subplots(len(outcomes), len(SIZES), figsize=(8, 9), layout="constrained")
    for panels, (sharding_type, outcome) in zip(grid, outcomes.items(), strict=True):
        panels[0].set_ylabel(sharding_type.value.replace("_", "\n"), rotation=0, ha="right", va="center")
        for panel, (name, num_rows) in zip(panels, SIZES.items(), strict=True):
            panel.set(xlim=(0, DIM), ylim=(4096, 0), xticks=[], yticks=[])
            panel.set_title(f"{name}: {num_rows} x {DIM}", fontsize=8)
            panel.set_frame_on(False)
            for rank, rectangles in outcome.rectangles(name).items():
                for (r0, r1), (c0, c1) in rectangles:
                    panel.add_patch(
                        Rectangle((c0, r0), c1 - c0, r1 - r0, facecolor=colours[rank], edgecolor="white")
                    )
            if not outcome.rectangles(name):
                whole = Rectangle((0, 0), DIM, num_rows, facecolor="#cccccc", edgecolor="white")
                panel.add_patch(whole)
    legend = [Patch(color=colour, label=f"rank {rank}") for rank, colour in enumerate(colours)]
    legend.append(Patch(color="#cccccc", label="whole on every rank"))
    figure.legend(handles=legend, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    draw("plans.svg")

# %% [markdown]
# ![The rectangles of every plan](plans.svg)
#
# ## The same numbers, whatever the plan
#
# The same batch went through all seven, before and after one training step. How far are the results apart?

# %%
if __name__ == "__main__":
    reference = outcomes[ShardingType.TABLE_WISE]
    print(f"{'sharding type':18} {'ranks':>5}  {'first forward':>13}  {'after the update':>16}")
    for sharding_type, outcome in outcomes.items():
        first = (outcome.first - reference.first).abs().max().item()
        second = (outcome.second - reference.second).abs().max().item()
        print(f"{sharding_type.value:18} {outcome.world_size:5}  {first:13.1e}  {second:16.1e}")
        torch.testing.assert_close(outcome.first, reference.first, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(outcome.second, reference.second, rtol=1e-5, atol=1e-6)
    moved = (reference.second - reference.first).abs().max().item()

# %% [markdown]
# The training step itself moved the outputs by up to {{ f"{moved:.1e}" }}; the plans differ in the last
# bits at most, where a sum is made of partial sums (of rows, or of a row's squares) and so rounds
# differently.
#
# ## What each sent over the wire
#
# All ranks together, in bytes, for one forward and one backward pass. Each line is one collective.

# %%
if __name__ == "__main__":
    for sharding_type, outcome in outcomes.items():
        print(f"{sharding_type.value} on {outcome.world_size} ranks: {sum(outcome.bytes_sent.values()):,}")
        for name, sent in outcome.bytes_sent.items():
            print(f"    {name:40} {sent:10,}")

    total = {kind: sum(outcome.bytes_sent.values()) for kind, outcome in outcomes.items()}
    two_ranks = {kind: total[kind] for kind, outcome in outcomes.items() if outcome.world_size == 2}
    least = min(two_ranks, key=lambda kind: two_ranks[kind])
    most = max(two_ranks, key=lambda kind: two_ranks[kind])

# %% [markdown]
# For this batch on two ranks, {{ least.value }} sent least ({{ f"{two_ranks[least]:,}" }} bytes) and
# {{ most.value }} most ({{ f"{two_ranks[most]:,}" }}). Which one is fastest depends on the tables, the ids
# and the network; the planner weighs them, and without constraints it may mix all types.
#
# Next: [device meshes](3_meshes.md).
