"""Print the kernel launches of a step of sharded tables on the simulated device of the tests, as JSON.

Run by `benchmarks host` in the folder of the simulated device, with Triton's interpreter.
"""

import json
from collections import Counter
from typing import Any

import torch
from simulated_device import DEVICE, Simulated, simulated_device  # type: ignore[import-not-found]
from triton.runtime.interpreter import GridExecutor

import meshrec
from benchmarks.harness import configs
from meshrec import distributed as md
from meshrec.optim import RowWiseAdagrad


def main() -> None:
    launches: Counter[str] = Counter()
    dispatch, run_grid = Simulated.__torch_dispatch__.__func__, GridExecutor.__call__

    def counted(kind: Any, op: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        aliases = [returned.alias_info for returned in op._schema.returns]
        is_view = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
        # MeshRec's operators launch what runs inside them. Views and allocations launch nothing.
        if op.namespace != "meshrec" and not is_view and "empty" not in op.name():
            launches[op.name()] += 1
        return dispatch(kind, op, types, arguments, options)

    def counted_grid(executor: Any, *arguments: Any, **options: Any) -> Any:
        launches[f"triton {executor.fn.__name__}"] += 1
        return run_grid(executor, *arguments, **options)

    Simulated.__torch_dispatch__ = classmethod(counted)
    # Patched first, so that the simulated device wraps the counter.
    GridExecutor.__call__ = counted_grid
    env, tables = md.ShardingEnv.single_process(), configs(8, 64, 4)
    with simulated_device() as reads:
        module = meshrec.EmbeddingBagCollection(tables)
        placed = {config.name: md.table_wise(rank=0) for config in tables}
        plan = md.construct_module_sharding_plan(module, placed, world_size=1)
        sharder = md.EmbeddingBagCollectionSharder(RowWiseAdagrad(lr=0.1))
        sharded = sharder.shard(module, plan, env, DEVICE)
        ids, lengths = Simulated(torch.arange(16)), Simulated(torch.ones(16, dtype=torch.int64))
        # The first step also sends what belongs to the plan.
        for _ in range(2):
            features = meshrec.KeyedJaggedTensor([f"f{t}" for t in range(8)], ids, lengths=lengths)
            reads.clear()
            launches.clear()
            values = sharded(features).wait().values()
            forward = dict(launches)
            gradient = Simulated(torch.ones(values.shape))
            launches.clear()
            torch.autograd.backward(values, gradient)
        print(json.dumps({"forward": forward, "backward": dict(launches), "reads": len(reads)}))


if __name__ == "__main__":
    main()
