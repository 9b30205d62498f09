"""Trains a model whose tables are larger than the memory that each process may have: split over 4 ranks they
fit. The largest table exceeds the limit by itself.
"""

import multiprocessing
import resource
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as torch_multiprocessing

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from meshrec import distributed as md
from meshrec.model_parallel import DistributedModelParallel
from meshrec.models import DLRM
from meshrec.optim import RowWiseAdagrad

RANKS = 4
LIMIT = 224 << 20  # bytes that a process may have on top of torch itself
ROWS = {"items": 1_000_000, "users": 125_000, "shops": 125_000}
DIM, BATCH, STEPS, HOT = 64, 128, 40, 500
PATH = "sparse_arch.embedding_bag_collection"


def limit_memory() -> None:
    """Limit this process to LIMIT more bytes of memory."""
    status = Path("/proc/self/status").read_text().splitlines()
    used = 1024 * int(next(line.split()[1] for line in status if line.startswith("VmData")))
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + LIMIT, most))


def make_model(device: str) -> DLRM:
    """Return a DLRM of three tables. On ``meta`` the tables take no memory."""
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
        for name, rows in ROWS.items()
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device(device))
    torch.manual_seed(0)
    return DLRM(collection, 4, [32, DIM], [32, 1])


def make_batch(step: int, rank: int) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
    """Return IDs from all over each table, and clicks that depend on the item's number."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    hot = torch.randint(0, HOT, (len(ROWS), BATCH), generator=generator)
    ids = hot * torch.tensor(list(ROWS.values()))[:, None] // HOT
    features = KeyedJaggedTensor(
        list(ROWS), ids.flatten(), lengths=torch.ones(ids.numel(), dtype=torch.int64)
    )
    return torch.rand(BATCH, 4, generator=generator), features, (hot[0] % 2).float()


def alone(rank: int) -> None:
    """Try to build the model in one process, where the tables do not fit."""
    limit_memory()
    try:
        make_model("cpu")
    except RuntimeError as error:
        reason = str(error).splitlines()[0].partition("DefaultCPUAllocator: ")[2]
        print(f"one process fails: {reason or error}", flush=True)
    else:
        raise SystemExit("the tables fit into one process: this example shows nothing")


def train(rank: int, store: str) -> None:
    """Train on one of four ranks, where the rank's share of the tables fits and is all that is made."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    limit_memory()
    model = make_model("meta")
    plan = md.construct_module_sharding_plan(
        model.get_submodule(PATH),
        {"items": md.row_wise(), "users": md.column_wise(), "shops": md.table_wise(rank=1)},
        world_size=RANKS,
    )
    sharders = [md.EmbeddingBagCollectionSharder(RowWiseAdagrad(lr=0.01))]
    sharded = DistributedModelParallel(model, plan=md.ShardingPlan({PATH: plan}), sharders=sharders)
    dense = [weight for name, weight in sharded.named_parameters() if PATH not in name]
    optimizer = torch.optim.Adagrad(dense, lr=0.01)
    for step in range(STEPS):
        dense_features, features, clicks = make_batch(step, rank)
        logits = sharded(dense_features, features).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, clicks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step in (0, STEPS // 2, STEPS - 1):
            print(f"{RANKS} processes, step {step:2d}: loss {loss.item():.3f}", flush=True)
    md.leave_process_group()


if __name__ == "__main__":
    size = 4 * DIM * sum(ROWS.values())
    print(f"tables {size >> 20} MiB, limit of each process {LIMIT >> 20} MiB", flush=True)
    multiprocessing.set_forkserver_preload(["torch", "meshrec.model_parallel", "meshrec.models"])
    torch_multiprocessing.start_processes(alone, nprocs=1, start_method="forkserver")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store",)
        torch_multiprocessing.start_processes(train, arguments, nprocs=RANKS, start_method="forkserver")
