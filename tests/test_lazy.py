import contextlib
import gc
import importlib

from meshrec.lazy import without_gc

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


def test_a_process_of_its_own_freezes_what_it_imports_and_loads_no_compiler_for_gpus(run_code):
    assert run_code(OWN).stdout == "False\n"
