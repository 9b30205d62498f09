import gc
import subprocess
import sys

import pytest

from meshrec.lazy import importing


def test_collections_wait_for_imports_and_go_on_after_an_error():
    def fail():
        with importing():
            assert not gc.isenabled()
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        fail()
    assert gc.isenabled()
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_program_that_imports_meshrec_keeps_torch_out_of_collections_and_ends_quietly():
    code = "import gc, meshrec; assert gc.isenabled(); assert gc.get_freeze_count() > 100_000"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
