"""Checks of the GPU path: `python -m benchmarks.gpu.checks kernels|sharded|pipelines [--device cuda]`."""

import argparse
import itertools
import tempfile
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshrec
from benchmarks.gpu.cases import Call, attention_calls, dist_calls, moved, nbit_calls, tbe_calls, wire_calls
from meshrec import distributed as md
from meshrec.model_parallel import DistributedModelParallel
from meshrec.ops.attention import naive as attention_naive
from meshrec.ops.attention import triton as attention_triton
from meshrec.ops.dist import naive as dist_naive
from meshrec.ops.dist import triton as dist_triton
from meshrec.ops.dist import wire_naive, wire_triton
from meshrec.ops.nbit import naive as nbit_naive
from meshrec.ops.nbit import triton as nbit_triton
from meshrec.ops.tbe import naive as tbe_naive
from meshrec.ops.tbe import triton as tbe_triton
from meshrec.optim import CombinedOptimizer, KeyedOptimizerWrapper, RowWiseAdagrad
from meshrec.pipeline import TrainPipeline
from meshrec.stages import DeviceLink, Staged

NAIVE = {
    name: op
    for module in (attention_naive, dist_naive, wire_naive, tbe_naive, nbit_naive)
    for name, op in vars(module).items()
}
MODULES = (attention_triton, dist_triton, wire_triton, tbe_triton, nbit_triton)
TRITON = {op.__name__: op for module in MODULES for op in module.OPS}


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [each for part in value or () for each in flat(part)]


def compare(call: Call, device: torch.device) -> None:
    """Run an op in plain torch on the CPU and as a Triton kernel on the device."""
    arguments = moved(call.arguments, torch.device("cpu"), call.op)
    on_device = moved(call.arguments, device, call.op)
    # On a GPU the dispatcher must find the kernel; on the CPU Triton's interpreter stands in for one.
    ops = torch.ops.meshrec if device.type == "cuda" else SimpleNamespace(**TRITON)
    expected, found = NAIVE[call.op](*arguments), getattr(ops, call.op)(*on_device)
    if call.changed:
        expected, found = ([args[at] for at in call.changed] for args in (arguments, on_device))
    expected, found = flat(expected), flat(found)
    if call.op == "route_ids":
        found[0] = found[0][: expected[0].numel()]  # unused words lie behind the messages
    for one, other in zip(found, expected, strict=True):
        rounded = other.dtype in (torch.float16, torch.bfloat16)
        rtol, atol = (2e-2, 2e-2) if rounded else (1e-4, 1e-5)
        if not other.dtype.is_floating_point:
            rtol = atol = 0.0
        torch.testing.assert_close(
            one.cpu(), other, rtol=rtol, atol=atol, msg=lambda text: f"{call.name}: {text}"
        )


def kernels(device: torch.device) -> str:
    """Compare every Triton kernel with its plain torch version."""
    torch.manual_seed(0)
    quick = device.type != "cuda"  # Triton's interpreter takes seconds where a GPU takes none
    calls: list[Iterable[Call]] = [
        *(tbe_calls(quick=quick), nbit_calls(quick=quick), wire_calls(), attention_calls(quick=quick))
    ]
    for ragged, weighted, wide in itertools.product((False, True), repeat=3):
        if not quick or wide == (ragged != weighted):  # every pair of two options
            batch = 4 if quick else 64
            calls.append(dist_calls(ragged=ragged, weighted=weighted, wide=wide, batch=batch))
    done: dict[str, int] = {}
    for call in itertools.chain(*calls):
        if quick and call.op in done:
            continue
        compare(call, device)
        done[call.op] = done.get(call.op, 0) + 1
    missing = sorted(TRITON.keys() - done.keys() - {"tbe_row_squares"})  # compared by column-split updates
    assert not missing, f"no case for {missing}"
    return f"{sum(done.values())} calls of {len(done)} ops equal plain torch"


def collection(*, sequence: bool) -> Any:
    torch.manual_seed(1)
    shapes = [("t0", 1000, ["a", "b"]), ("t1", 77, ["b"]), ("t2", 300, ["c"])]
    kind = meshrec.EmbeddingConfig if sequence else meshrec.EmbeddingBagConfig
    tables = [
        kind(name=name, num_embeddings=rows, embedding_dim=16, feature_names=features)
        for name, rows, features in shapes
    ]
    return (meshrec.EmbeddingCollection if sequence else meshrec.EmbeddingBagCollection)(tables=tables)


def features(seed: int, device: torch.device | str, batch: int = 64) -> meshrec.KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (3 * batch,), generator=generator)
    values = torch.randint(0, 77, (int(lengths.sum()),), generator=generator)
    made = meshrec.KeyedJaggedTensor.from_lengths_sync(["a", "b", "c"], values, lengths=lengths)
    return made.to(torch.device(device))


def values_of(out: Any) -> list[Tensor]:
    out = out.wait() if hasattr(out, "wait") else out
    return [each.values() for each in out.values()] if isinstance(out, dict) else [out.values()]


def sharded(device: torch.device) -> str:
    """Train sharded modules of one rank, and compare them with unsharded ones on the CPU."""
    for sequence in (False, True):
        module = collection(sequence=sequence)
        builders = {"t0": md.row_wise(), "t1": md.data_parallel(), "t2": md.table_wise(rank=0)}
        plan = md.construct_module_sharding_plan(module, builders, world_size=1)
        kind = md.EmbeddingCollectionSharder if sequence else md.EmbeddingBagCollectionSharder
        on_device = kind(RowWiseAdagrad(lr=0.1)).shard(module, plan, device=device)
        fused = meshrec.fuse(collection(sequence=sequence), optimizer=RowWiseAdagrad(lr=0.1))
        for step in range(3):
            found = values_of(on_device(features(step, device)))
            expected = values_of(fused(features(step, "cpu")))
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5)
            sum(each.square().sum() for each in found).backward()
            sum(each.square().sum() for each in expected).backward()
    return "pooled and sequence modules equal unsharded ones over 3 steps"


class Clicks(nn.Module):
    """A model of tables and a dense layer, from a batch to (losses, output)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = collection(sequence=False)
        torch.manual_seed(2)
        self.dense = nn.Linear(64, 1)

    def forward(self, batch: meshrec.KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        out = self.dense(self.tables(batch).values()).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(out, torch.ones_like(out)), out.detach()


def trained(device: torch.device, *, pipelined: bool) -> list[Tensor]:
    model = DistributedModelParallel(Clicks(), device=device)
    dense = KeyedOptimizerWrapper(
        dict(model.module.dense.named_parameters()) if hasattr(model.module, "dense") else {},
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    optimizer = CombinedOptimizer([("dense", dense)])
    batches = [features(seed, "cpu") for seed in range(6)]
    outputs = []
    if pipelined:
        pipeline, iterator = TrainPipeline(model, optimizer, device=device), iter(batches)
        for _ in batches:
            outputs.append(pipeline.progress(iterator))
    else:
        for batch in batches:
            optimizer.zero_grad()
            losses, output = model(batch.to(device))
            losses.sum().backward()
            optimizer.step()
            outputs.append(output)
    return [each.cpu() for each in outputs]


def pipelines(device: torch.device) -> str:
    """Compare the train pipeline with the plain loop, and a model in two stages with the whole."""
    plain, overlapped = trained(device, pipelined=False), trained(device, pipelined=True)
    for one, other in zip(overlapped, plain, strict=True):
        torch.testing.assert_close(one, other)
    return f"the pipeline equals the plain loop over 6 batches; {stages(device)}"


def stages(device: torch.device) -> str:
    """Compare two stages on two streams with the whole model, and dropout with the same cut elsewhere."""
    torch.manual_seed(3)
    layers = [nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)]
    model, x = nn.Sequential(*layers).to(device), torch.randn(96, 32, device=device)
    expected = model(x)
    expected.square().mean().backward()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    staged = Staged(model, cuts=["2"], split_size=32, devices=[device, device], link=DeviceLink())
    found = staged(x)
    found.square().mean().backward()
    torch.testing.assert_close(found, expected)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
    dropped = []
    for cut in ("2", "4"):
        drops = nn.Sequential(*layers[:2], nn.Dropout(0.5), *layers[2:4], nn.Dropout(0.2), layers[4]).to(
            device
        )
        torch.manual_seed(4)
        stages = Staged(drops, cuts=[cut], split_size=32, devices=[device, device], link=DeviceLink())
        dropped.append(stages(x))
    torch.testing.assert_close(*dropped)
    return "two stages equal the whole model, and draw the same numbers wherever they are cut"


def main() -> None:
    checks = {"kernels": kernels, "sharded": sharded, "pipelines": pipelines}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("check", choices=checks)
    parser.add_argument(
        "--device", default="cuda", help="device to check (cpu: a trial of the checks themselves)"
    )
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.check != "kernels":
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        if device.type == "cuda":
            torch.cuda.set_device(0)
            device = torch.device("cuda", 0)
        print(checks[arguments.check](device))
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
