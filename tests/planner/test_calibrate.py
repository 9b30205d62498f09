import torch.distributed as dist

from meshrec.planner.calibrate import Sizes, calibrate
from meshrec.planner.hardware import get_profile

TINY = Sizes(num_rows=1 << 10, num_ids=1 << 9, stream_bytes=1 << 16, rounds=1)


def test_one_process_measures_its_kernels():
    profile = calibrate(sizes=TINY)
    assert profile.intra == get_profile("cpu").intra
    assert "built-in profile 'cpu'" in profile.sources["intra"]
    assert not profile.full_duplex
    assert 0 < profile.update_id_seconds < 1
    assert profile.memory > 1 << 20


def measure():
    return calibrate(dist.group.WORLD, sizes=TINY).to_json()


def test_all_ranks_agree_on_the_slowest_figures(ranks):
    first, second = ranks(2).run(measure)
    assert first == second
    assert first["intra"]["all_to_all"] > 0
    assert "measured on cpu" in first["sources"]["intra"]
