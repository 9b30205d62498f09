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


@pytest.mark.parametrize("path", sorted(NAMES))
def test_names_lead_where_the_page_says(path):
    module, _, name = path.rpartition(".")
    target = NAMES[path].split("`")[1]
    there, _, own = target.rpartition(".")
    assert getattr(importlib.import_module(module), name) is getattr(importlib.import_module(there), own)


@pytest.mark.parametrize("path", sorted(MISSING_NAMES))
def test_missing_names_are_explained_as_the_page_says(path):
    module, _, name = path.rpartition(".")
    if path in MODULES:  # the line speaks for the names that the module lacks
        module, name = path, "something_else"
    with pytest.raises(ImportError) as raised:
        exec(f"from {module} import {name}" if module else f"from {path} import something_else", {})
    assert MISSING_NAMES[path] in str(raised.value)
