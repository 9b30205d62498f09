import pytest
import torch.distributed as dist

from meshrec.planner.calibration.calibrate import Sizes, calibrate, link_of
from meshrec.planner.hardware import HardwareProfile, get_profile

TINY = Sizes(batch_size=4, steps=1, rounds=1)


def test_one_process_measures_its_kernels(caplog):
    profile = calibrate(sizes=TINY)
    assert profile.name == "calibrated"
    assert profile.intra == get_profile("cpu").intra
    assert "built-in profile 'cpu'" in profile.sources["intra"]
    assert profile.sorts_once
    assert not profile.full_duplex
    assert 0 <= profile.update_id_seconds < 1
    assert profile.memory > 1 << 20
    # One process splits no table: what that costs stays the built-in profile's, and is told.
    assert profile.split_id_seconds == get_profile("cpu").split_id_seconds
    assert "kept is 6e-09 of the built-in profile 'cpu'" in profile.sources["split_id_seconds"]
    assert "calibration: split_id_seconds is not determined" in caplog.text


def measured():
    return calibrate(dist.group.WORLD, sizes=TINY).to_json()


def test_all_ranks_agree_on_the_figures(ranks):
    first, second = ranks(2).run(measured)
    assert first == second
    assert first["intra"] == first["inter"]
    assert "measured on cpu" in first["sources"]["intra"]
    assert HardwareProfile.from_json(first).to_json() == first


def measured_in_nodes():
    return calibrate(dist.group.WORLD, local_size=2, sizes=TINY).to_json()


def test_nodes_have_links_of_their_own(ranks):
    profile = ranks(4).run(measured_in_nodes)[0]
    assert profile["intra"] != profile["inter"]


def test_a_link_names_the_figures_that_noise_hid():
    small, large = 1e-4, 1e-4 + 1e-9 * ((1 << 22) - (1 << 14))
    link, bounds = link_of([(small, large)] * 3, 2, full_duplex=True)
    assert bounds == []
    assert link.all_to_all == pytest.approx(0.5e9)
    assert link.latency == pytest.approx(small - 1e-9 * (1 << 14))
    hidden, bounds = link_of([(1e-6, large), (large, large), (small, large)], 2, full_duplex=True)
    assert bounds == ["reduce_scatter", "latency"]
    assert hidden.latency > 0
    assert hidden.reduce_scatter > link.reduce_scatter
