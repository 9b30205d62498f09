"""The host benchmark's counts, which do not depend on the machine."""

import importlib.util

import pytest

from benchmarks.host import count_launches


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_a_step_of_sharded_tables_launches_few_kernels() -> None:
    launches = count_launches()
    assert sum(launches["forward"].values()) + sum(launches["backward"].values()) <= 24, launches
    assert launches["forward"]["triton look_up"] == 1
    assert launches["reads"] <= 1
