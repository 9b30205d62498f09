import importlib

import pytest

from meshrec.compat.bridge.names import MODULES, VERSION

TARGETS = sorted({target for names in MODULES.values() for target in names.values()})


@pytest.mark.parametrize("target", TARGETS)
def test_every_name_leads_somewhere(target):
    path, _, name = target.partition(":")
    assert getattr(importlib.import_module(path), name) is not None


def test_every_module_is_in_a_package_that_is_there():
    parents = {path.rpartition(".")[0] for path in MODULES} - {""}
    assert sorted(parents - set(MODULES)) == []


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", sorted(path for path in MODULES if path.startswith("torchrec")))
def test_torchrec_has_every_name(path):
    pytest.importorskip("torchrec", reason="`make parity` installs it")
    theirs = importlib.import_module(path)
    assert [name for name in MODULES[path] if not hasattr(theirs, name)] == []
    assert importlib.import_module("torchrec").__version__.split("+")[0] == VERSION
