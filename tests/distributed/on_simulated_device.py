"""One rank of test_simulated_device.py: its arguments are STORE RANK WORLD FIRST_SEED NUM_SEEDS DEVICE.

Trains sharded modules of random plans on a device and on the CPU, and compares them. The device is simulated,
or a real one.
"""

import contextlib
import random
import sys
import warnings

import torch
import torch.distributed as dist

from meshrec import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from meshrec import distributed as md
from meshrec.comms.mesh import default_env
from meshrec.optim import SGD, Adam, RowWiseAdagrad

IS_SIMULATED = sys.argv[-1].startswith("simulated")
if IS_SIMULATED:  # with a backend of Python's, autograd takes no GPU for an accelerator
    from simulated_device import Simulated, simulated_device

FEATURES = ["a", "b", "c", "nobody"]


def drawn_module(draw, sequence, weighted):
    tables = []
    for number in range(draw.randint(1, 4)):
        features = draw.sample(FEATURES[:3], draw.randint(1, 2))
        options = {
            "name": f"t{number}",
            "num_embeddings": draw.choice([3, 10, 40]),
            "embedding_dim": 4 * draw.choice([1, 2, 3]) if sequence else draw.choice([4, 8, 12, 20]),
            "feature_names": features,
            "data_type": draw.choice([DataType.FP32, DataType.FP32, DataType.BF16]),
        }
        if sequence:
            tables.append(EmbeddingConfig(**options))
        else:
            pooling = PoolingType.SUM if weighted else draw.choice(list(PoolingType)[:2])
            tables.append(EmbeddingBagConfig(**options, pooling=pooling))
    if sequence:
        # One width for all, as the module of one output demands.
        tables = [EmbeddingConfig(**{**vars(table), "embedding_dim": 8}) for table in tables]
        return EmbeddingCollection(tables=tables)
    return EmbeddingBagCollection(tables=tables, is_weighted=weighted)


def drawn_plan(draw, module, env):
    size = env.shard.size
    ways = [
        md.row_wise,
        md.column_wise,
        md.data_parallel,
        lambda: md.table_wise(rank=draw.randrange(size)),
        lambda: md.column_wise(ranks=[draw.randrange(size) for _ in range(2)]),
    ]
    names = [config.name for config, _ in module.tables().values()]
    builders = {name: draw.choice(ways)() for name in names}
    return md.construct_module_sharding_plan(module, builders, world_size=size)


def drawn_batch(draw, rank, weighted, ragged):
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30) + rank)
    strides = [draw.randint(0, 4) for _ in FEATURES] if ragged else [draw.randint(1, 4)] * len(FEATURES)
    lengths = torch.randint(0, 4, (sum(strides),), generator=generator)
    values = torch.randint(0, 3, (int(lengths.sum()),), generator=generator)
    values = values if draw.random() < 0.5 else values.int()
    weights = torch.rand(values.numel(), generator=generator) if weighted else None
    stride = {"stride_per_key_per_rank": [[each] for each in strides]} if ragged else {}
    return KeyedJaggedTensor(FEATURES, values, weights, lengths=lengths, **stride)


@contextlib.contextmanager
def counted_reads(device):
    """The reads of the device on the host, as a list that grows."""
    if IS_SIMULATED:
        with simulated_device() as reads:
            yield reads
        return
    with warnings.catch_warnings(record=True) as reads:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")  # each wait for the device is a warning
        yield reads


def on_device(batch, device):
    """The batch as it comes from a data loader, copied to the device."""

    def copied(tensor):
        return Simulated(tensor) if IS_SIMULATED else tensor.to(device, copy=True)

    weights, strides = batch.weights_or_none(), {}
    if batch.variable_stride_per_key():
        strides = {"stride_per_key_per_rank": [[each] for each in batch.stride_per_key()]}
    return KeyedJaggedTensor(
        batch.keys(),
        copied(batch.values()),
        None if weights is None else copied(weights.detach()).requires_grad_(),
        lengths=copied(batch.lengths()),
        offsets=copied(batch.offsets()),
        **strides,
    )


def host(tensor):
    return tensor.inner if IS_SIMULATED and isinstance(tensor, Simulated) else tensor.cpu()


def results(sharded, batch):
    """The values of every output, by name."""
    found = sharded(batch).wait()
    if isinstance(found, dict):
        return {name: jagged.values() for name, jagged in found.items()}
    return {"pooled": found.values()}


def step(sharded, batch):
    found = results(sharded, batch)
    loss = sum((values * (1 + torch.ones_like(values).cumsum(0))).sum() for values in found.values())
    torch.autograd.backward(loss)  # Tensor.backward would switch the mode of the device off
    weights = batch.weights_or_none()
    return found, None if weights is None else weights.grad


def check(seed, device):
    draw = random.Random(seed)
    env = default_env()
    sequence = draw.random() < 0.4
    weighted = not sequence and draw.random() < 0.5
    ragged = sequence and draw.random() < 0.5
    torch.manual_seed(seed)
    module = drawn_module(draw, sequence, weighted)
    plan = drawn_plan(draw, module, env)
    optimizer = draw.choice([SGD(lr=0.1), RowWiseAdagrad(lr=0.1), Adam(lr=0.01), None])
    kind = md.EmbeddingCollectionSharder if sequence else md.EmbeddingBagCollectionSharder
    # Not update="on_step": a simulated tensor cannot be the sparse gradient that it collects.
    sharder = kind(optimizer)
    batches = [drawn_batch(draw, env.shard.rank, weighted, ragged) for _ in range(2)]
    expected_module = sharder.shard(module, plan, env)
    expected = []
    for batch in batches:
        if weighted:
            batch.weights().requires_grad_()
        expected.append(step(expected_module, batch))
    with counted_reads(device) as reads:
        sharded = sharder.shard(module, plan, env, device)
        for batch, (rows, grad) in zip(batches, expected, strict=True):
            theirs = on_device(batch, device)
            with torch.no_grad():
                results(sharded, theirs)  # the first batch also sends what belongs to the plan
                reads.clear()
                results(sharded, theirs)
            # The sizes; features with batch sizes of their own tell them inside the messages as well, of
            # the split tables and of those that every rank holds.
            assert len(reads) <= (3 if ragged else 1), (seed, reads)
            found, weight_grad = step(sharded, theirs)
            assert found.keys() == rows.keys()
            for name in found:
                torch.testing.assert_close(host(found[name]), rows[name], msg=lambda m: f"{seed}: {m}")
            if weighted:
                torch.testing.assert_close(host(weight_grad), grad)
        rounded = {torch.bfloat16: {"rtol": 0.02, "atol": 0.02}}  # the interpreter cuts bf16 off
        for own, other in zip(sharded.parameters(), expected_module.parameters(), strict=True):
            assert own.device == device
            for one, two in ((own, other), (own.grad, other.grad)):
                if two is not None:
                    two = two.coalesce().to_dense() if two.is_sparse else two
                    one = host(one.data)
                    torch.testing.assert_close(one, two.data, **rounded.get(two.dtype, {}))
    return sequence, weighted, ragged


if __name__ == "__main__":
    store, rank, world, first, number = sys.argv[1], *map(int, sys.argv[2:6])
    device = torch.device(sys.argv[6])
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    kinds = {check(seed, device) for seed in range(first, first + number)}
    print("equal", len(kinds))
    if world > 1:
        dist.destroy_process_group()
