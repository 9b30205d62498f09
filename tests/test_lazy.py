import ast
import contextlib
import gc
import importlib
from pathlib import Path

import pytest

import meshrec.models
from meshrec.lazy import import_on_use, without_gc

OWN = """
import gc, sys
from meshrec.lazy import declare_command, without_gc
with without_gc():
    import json
assert gc.get_freeze_count() == 0
declare_command()
with without_gc():
    import meshrec.cli.train
assert gc.isenabled() and gc.get_freeze_count() > 100_000
print("triton" in sys.modules)
import torch.distributed.tensor
import meshrec.comms.leaving
meshrec.comms.leaving._drop_group_references()
print("torch._dynamo" in sys.modules)
"""


def test_nothing_is_collected_inside_and_afterwards_all_is_as_before():
    assert gc.isenabled()
    with without_gc():
        assert not gc.isenabled()
        with without_gc():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with contextlib.suppress(ModuleNotFoundError), without_gc():
        importlib.import_module("no_such_module")
    assert gc.isenabled()


def test_a_process_of_its_own_freezes_what_it_imports_and_loads_no_compiler_to_the_end(run_code):
    assert run_code(OWN).stdout == "False\nFalse\n"


def test_names_of_a_package_are_imported_on_first_use():
    getattribute = import_on_use("meshrec.models")
    assert meshrec.models.DIN is getattribute("DIN")
    assert {"DIN", "TwoTower"} <= set(dir(meshrec.models))
    with pytest.raises(AttributeError, match=r"no attribute 'DINN'.*meshrec\.models\.__all__"):
        _ = meshrec.models.DINN


def test_no_name_that_is_imported_on_first_use_is_a_module_of_its_package():
    """An import of the module would put the module in the place of the name."""
    hidden = []
    for init in Path(meshrec.__file__).parent.rglob("__init__.py"):
        for block in ast.parse(init.read_text()).body if "import_on_use" in init.read_text() else ():
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
                names = [alias.name for node in ast.walk(block) for alias in getattr(node, "names", ())]
                modules = {path.stem for path in init.parent.iterdir()}
                hidden += [(init.parent.name, name) for name in names if name in modules]
    assert hidden == []
