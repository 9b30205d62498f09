import importlib

import pytest

from meshrec.compat.bridge.missing import MISSING
from meshrec.compat.bridge.names import MODULES, VERSION

# TorchRec 1.9 brought these; `make parity` installs 1.8.0 unless it is told to take 1.9.2.
NEW_IN_1_9 = {"torchrec.distributed.planner.dry_run"}


@pytest.mark.parametrize("path", sorted(MISSING))
def test_what_is_missing_is_not_there(path):
    module, _, name = path.rpartition(".")
    assert name not in MODULES.get(module, {})
    # A module's line speaks for the names that it lacks, unless names in it are said to be missing already.
    assert MISSING[path].endswith((".", "machine."))


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", sorted(path for path in MISSING if path != "torchrec.inference"))
def test_torchrec_has_it(path):
    pytest.importorskip("torchrec", reason="`make parity` installs it")
    installed = importlib.import_module("torchrec").__version__.split("+")[0]
    if path in NEW_IN_1_9 and installed != VERSION:
        pytest.skip(f"TorchRec {installed} does not have it yet")
    module, _, name = path.rpartition(".")
    if module and hasattr(importlib.import_module(module), name):
        return
    importlib.import_module(path)
