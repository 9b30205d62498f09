"""The page for users of TorchRec: every name that it lists is there, or missing as it says; and none is
forgotten."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from meshrec.compat.bridge import finder
from meshrec.compat.bridge.missing import MISSING
from meshrec.compat.bridge.names import MODULES

PAGE = (Path(__file__).parents[3] / "docs" / "torchrec" / "names.md").read_text()
ROW = re.compile(r"^\| `([\w.]+)` \| (.*) \|$", re.MULTILINE)
NAMES, MISSING_NAMES = (
    dict(ROW.findall(part)) for part in PAGE.split("## Names")[1].split("## What is not there")
)


@pytest.fixture(scope="module", autouse=True)
def bridge():
    """The bridge in place of whatever is installed, and the modules of that put away."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.split(".")[0] in ("torchrec", "fbgemm_gpu")]:
            patch.delitem(sys.modules, name)
        patch.setattr(sys, "meta_path", list(sys.meta_path))
        finder.install(force=True)
        yield
        finder.uninstall()


def test_no_name_is_forgotten():
    bridged = {f"{module}.{name}" for module, names in MODULES.items() for name in names}
    assert set(NAMES) == bridged
    assert set(MISSING_NAMES) == set(MISSING)


def test_names_lead_where_the_page_says():
    targets = {path: target.split("`")[1] for path, target in NAMES.items()}
    assert [path for path, target in targets.items() if named(path) is not named(target)] == []


def named(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_missing_names_are_explained_as_the_page_says():
    assert [path for path in MISSING_NAMES if MISSING_NAMES[path] not in refusal(path)] == []


def refusal(path):
    """The error of an import of a missing name, or of something from a missing module."""
    module, _, name = path.rpartition(".")
    if path in MODULES or not module:  # the line speaks for the names that the module lacks
        module, name = path, "something_else"
    with pytest.raises(ImportError) as raised:
        exec(f"from {module} import {name}", {})
    return str(raised.value)
