import tempfile

import torch.distributed as dist
import torch.multiprocessing as mp

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


def measure(rank, file, results):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    try:
        results[rank] = calibrate(dist.group.WORLD, sizes=TINY).to_json()
    finally:
        dist.destroy_process_group()


def test_all_ranks_agree_on_the_slowest_figures():
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(measure, (f"{folder}/store", results), nprocs=2)
        assert results[0] == results[1]
        assert results[0]["intra"]["all_to_all"] > 0
        assert "measured on cpu" in results[0]["sources"]["intra"]
