import importlib
import logging
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from meshrec.compat.bridge import finder
from meshrec.compat.bridge.names import MODULES


@pytest.fixture
def bridge(monkeypatch):
    """The bridge in place of whatever is installed, and the modules of that put away."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("torchrec", "fbgemm_gpu")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    finder.install(force=True)
    yield
    finder.uninstall()


@pytest.mark.parametrize("path", sorted(MODULES))
def test_every_module_can_be_imported_with_all_its_names(bridge, path):
    module = importlib.import_module(path)
    assert [name for name in MODULES[path] if not hasattr(module, name)] == []
    assert set(MODULES[path]) <= set(dir(module))


def test_all_forms_of_import(bridge):
    import torchrec
    import torchrec.distributed.planner
    from torchrec.distributed.types import ShardingType
    from torchrec.modules import mlp

    from meshrec.modules import MLP
    from meshrec.plan import sharding_plan

    assert ShardingType is sharding_plan.ShardingType
    assert mlp.MLP is MLP
    assert torchrec.distributed.planner is sys.modules["torchrec.distributed.planner"]
    assert torchrec.modules.mlp is mlp
    assert torchrec.__version__ == "1.9.2"
    space = {}
    exec("from torchrec.optim.keyed import *", space)
    assert "CombinedOptimizer" in space


def test_a_function_keeps_its_name_beside_a_submodule_of_that_name(bridge):
    import torchrec.optim.apply_optimizer_in_backward

    from meshrec.compat.bridge import optimizers

    assert callable(optimizers.apply_optimizer_in_backward)
    assert torchrec.optim.apply_optimizer_in_backward is optimizers.apply_optimizer_in_backward


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("from torchrec.distributed import DataLoadingThread", "docs/from-torchrec.md"),
        ("import torchrec.schema", r"MeshRec.*torchrec\.schema"),
        ("from torchrec.quant.embedding_modules import X", r"meshrec\.quant\.quantize"),
        ("from torchrec.modules.mlp import MPL", r"torchrec\.modules\.mlp\.MLP"),
        ("from torchrec import ShardingType", r"ShardingType.*torchrec\.distributed\.types"),
        ("import torchrec.nothing", "docs/from-torchrec.md"),
        ("from fbgemm_gpu.split_embedding_configs import SparseType", "MeshRec"),
    ],
)
def test_what_is_not_there_says_so_and_names_the_nearest(bridge, code, message):
    with pytest.raises(ImportError, match=message):
        exec(code, {})


def test_an_attribute_that_is_not_there_is_an_ordinary_error(bridge):
    import torchrec.distributed

    assert not hasattr(torchrec.distributed, "ShardedModule")
    with pytest.raises(AttributeError, match="ShardedEmbeddingBagCollection"):
        _ = torchrec.distributed.ShardedModule


def test_the_bridge_can_be_taken_away(bridge):
    import torchrec  # noqa: F401

    assert finder.bridged_packages() == ("torchrec", "fbgemm_gpu")
    finder.uninstall()
    assert finder.bridged_packages() == ()
    assert "torchrec" not in sys.modules


def test_other_packages_are_left_alone(bridge):
    assert finder.Bridge(["torchrec"]).find_spec("torchvision", None) is None
    assert finder.Bridge(["torchrec"]).find_spec("fbgemm_gpu", None) is None


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder that Python imports from, with a package of TorchRec's name."""
    (tmp_path / "torchrec.py").write_text("__version__ = 'their own'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "torchrec"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    finder.uninstall()
    sys.modules.pop("torchrec", None)


def test_an_installed_package_is_used_and_it_is_said(packages, caplog):
    assert "torchrec" not in finder.install()
    import torchrec

    assert "torchrec is installed and used as it is" in caplog.text
    assert torchrec.__version__ == "their own"
    with pytest.raises(ImportError, match="MeshRec"):
        finder.install(force=True)


def test_the_environment_can_force_it(packages, monkeypatch):
    monkeypatch.setenv(finder.FORCE, "1")
    assert "torchrec" in finder.install()
    monkeypatch.setenv(finder.FORCE, "0")
    assert "torchrec" not in finder.install()


def test_the_bridge_is_light(run_code):
    code = (
        "import sys, torch, meshrec.compat.torchrec as c; c.install(force=True); import torchrec; "
        "print([name for name in sys.modules if name.startswith(('torch._dynamo', 'meshrec.planner'))])"
    )
    assert run_code(code).stdout.strip() == "[]"


BY_JOBLIB = """
import meshrec.compat.torchrec
from joblib import Parallel, delayed

def child(_):
    import torchrec
    return torchrec.__spec__.origin

if __name__ == "__main__":
    print(*Parallel(n_jobs=2, backend="loky")(delayed(child)(n) for n in range(2)))
"""
BY_MULTIPROCESS = """
import meshrec.compat.torchrec
import multiprocess

def child(queue):
    import torchrec
    queue.put(torchrec.__spec__.origin)

if __name__ == "__main__":
    context = multiprocess.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(queue.get(timeout=100))
    process.join()
"""


@pytest.mark.parametrize(("package", "script"), [("joblib", BY_JOBLIB), ("multiprocess", BY_MULTIPROCESS)])
def test_processes_of_other_packages_have_the_bridge_too(package, script):
    pytest.importorskip(package)
    environment = {**os.environ, "MESHREC_COMPAT_FORCE": "1"}
    # Without a file, as in a notebook: a child cannot import the script, and with it the bridge.
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert set(done.stdout.split()) == {"meshrec.compat.torchrec"}, done.stderr


def test_a_folder_without_init_is_not_an_installed_package(tmp_path, monkeypatch):
    (tmp_path / "torchrec").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in [name for name in sys.modules if name.split(".")[0] in ("torchrec", "fbgemm_gpu")]:
        monkeypatch.delitem(sys.modules, name)
    assert "torchrec" in finder.install()
    finder.uninstall()


def test_forced_after_the_import_nothing_else_is_said(packages, caplog):
    assert "torchrec" not in finder.install()
    assert "torchrec" in finder.install(force=True)
    import torchrec

    assert torchrec.__version__ != "their own"
    assert Path(torchrec.__file__).is_file()
    assert caplog.text == ""


def test_a_replaced_name_reaches_the_code_behind_it(bridge):
    from torchrec.modules import hash_mc_metrics
    from torchrec.modules.hash_mc_metrics import ConsoleScalarLoggerBackend

    with mock.patch("torchrec.modules.hash_mc_metrics.logging") as replaced:
        ConsoleScalarLoggerBackend("somewhere.log")
    replaced.FileHandler.assert_called_once_with("somewhere.log", mode="w")
    assert hash_mc_metrics.logging is logging
    assert importlib.import_module("meshrec.compat.bridge.hash_mc_metrics").logging is logging


def test_a_replaced_name_of_torch_stays_in_the_bridged_module(bridge):
    from torch.distributed._shard import sharded_tensor

    with mock.patch("torchrec.distributed.types.ShardedTensor", None):
        assert sharded_tensor.ShardedTensor is not None
