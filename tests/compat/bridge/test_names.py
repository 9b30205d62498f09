import importlib

import pytest

from meshrec.compat.bridge.names import MODULES, VERSION

# TorchRec 1.9 brought these; `make parity` installs 1.8.0 unless it is told to take 1.9.2.
NEW_IN_1_9 = {
    "torchrec.modules.embedding_modules": {
        "mark_data_parallel_skip_grad_sync",
        "should_skip_data_parallel_grad_sync",
    },
    "torchrec.distributed.planner.types": {
        "PlannerConfig",
        "PlannerSessionContext",
        "PlannerVariant",
        "ShardingPlanRequest",
        "ShardingPlanResult",
        "StorageReservationPolicy",
    },
}
NEW_MODULES_IN_1_9 = {
    f"torchrec.distributed.planner.{module}"
    for module in ("api", "executor", "protocols", "provider", "reporter")
}


def test_every_module_is_in_a_package_that_is_there():
    parents = {path.rpartition(".")[0] for path in MODULES} - {""}
    assert sorted(parents - set(MODULES)) == []


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", sorted(path for path in MODULES if path.startswith("torchrec")))
def test_torchrec_has_every_name(path):
    pytest.importorskip("torchrec", reason="`make parity` installs it")
    installed = importlib.import_module("torchrec").__version__.split("+")[0]
    if path in NEW_MODULES_IN_1_9 and installed != VERSION:
        pytest.skip(f"TorchRec {installed} does not have it yet")
    lacking = {name for name in MODULES[path] if not hasattr(importlib.import_module(path), name)}
    assert lacking <= (set() if installed == VERSION else NEW_IN_1_9.get(path, set()))
