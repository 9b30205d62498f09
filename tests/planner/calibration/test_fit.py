from dataclasses import replace

import numpy as np
import pytest

from meshrec.planner.calibration.fit import fit
from meshrec.planner.calibration.trials import make_trials
from meshrec.planner.estimators import PHASES
from meshrec.planner.evaluate import evaluate
from meshrec.planner.types import Topology


def machine(profile):
    return Topology(world_size=2, compute_device="cpu", local_world_size=2, hardware=profile)


def predicted(profile, trials):
    topology = machine(profile)
    return [evaluate({"": t.plan(2)}, t.tables(), topology, batch_size=t.batch_size).phases for t in trials]


@pytest.fixture
def truth(cpu_profile):
    link = replace(cpu_profile.intra, reduce_scatter=3e9)
    return replace(cpu_profile, intra=link, inter=link)


@pytest.fixture
def known(truth):
    """What is known beforehand: links that are twice as fast alone, and guesses."""
    link = truth.intra
    link = replace(link, latency=link.latency / 2, all_to_all=link.all_to_all * 2, reduce_scatter=6e9)
    return replace(truth, intra=link, inter=link, read_bandwidth=3e10, update_id_seconds=3e-9)


def test_the_model_explains_what_it_predicted(truth, known):
    trials = make_trials(2, 256)
    seconds = predicted(truth, trials)
    found = fit(known, trials, seconds, machine(known))
    for there, here in zip(seconds, predicted(found, trials), strict=True):
        assert here == {phase: pytest.approx(there[phase], rel=0.02) for phase in PHASES}
    assert found.intra.latency == pytest.approx(truth.intra.latency, rel=0.01)
    assert found.intra.reduce_scatter == pytest.approx(truth.intra.reduce_scatter, rel=0.05)
    assert found.inter == found.intra
    assert (found.intra.all_reduce, found.memory) == (known.intra.all_reduce, known.memory)


def test_noise_moves_it_little(truth, known):
    trials = make_trials(2, 256)
    noise = np.random.default_rng(0)
    seconds = predicted(truth, trials)
    noisy = [{phase: s * noise.uniform(0.8, 1.25) for phase, s in times.items()} for times in seconds]
    found = fit(known, trials, noisy, machine(known))
    for there, here in zip(seconds, predicted(found, trials), strict=True):
        assert sum(here.values()) == pytest.approx(sum(there.values()), rel=0.15)


def test_what_was_not_measured_is_kept(truth):
    trials = make_trials(2, 64)[:1]
    found = fit(truth, trials, [{"lookup": 1.0}], machine(truth))
    assert predicted(found, trials)[0]["lookup"] == pytest.approx(1.0)
    assert found.intra == truth.intra
    assert (found.update_bandwidth, found.update_id_seconds) == (pytest.approx(5e9), 1e-9)
    assert {"update_bandwidth", "update_id_seconds", "all_to_all"} <= set(found.sources)
    alone = replace(machine(truth), world_size=1, local_world_size=1)
    found = fit(truth, make_trials(1, 64)[:1], [{"update": 1.0}], alone)
    assert found.intra == truth.intra
    assert "no phase measured uses it; kept is 2e-09" in found.sources["split_id_seconds"]
    assert "Run again under torchrun" in found.sources["split_id_seconds"]


def test_a_figure_that_a_loaded_machine_hides_is_kept_and_told(truth):
    """Steps in which reading rows took no time: the fit would say 0 seconds, and endless bytes per second."""
    trials = make_trials(2, 256)
    free = replace(truth, read_row_seconds=1e-30, read_bandwidth=1e30, kernel_seconds=1e-3)
    found = fit(truth, trials, predicted(free, trials), machine(truth))
    assert (found.read_row_seconds, found.read_bandwidth) == (
        truth.read_row_seconds,
        pytest.approx(truth.read_bandwidth),
    )
    assert found.update_bandwidth == pytest.approx(truth.update_bandwidth, rel=0.1)
    assert set(found.sources) >= {"read_row_seconds", "read_bandwidth"}
    told = found.sources["read_bandwidth"]
    assert "s per byte, next to nothing in all of them; kept is 1e+10 of the built-in profile 'round'" in told
    assert "Run again on a machine that does nothing else, and without --quick." in told


def test_a_link_is_no_ten_times_as_fast_as_alone(truth):
    trials = make_trials(2, 256)
    slow = replace(truth.intra, all_to_all=truth.intra.all_to_all / 30)
    known = replace(truth, intra=slow, inter=slow)
    found = fit(known, trials, predicted(truth, trials), machine(known))
    assert slow.all_to_all <= found.intra.all_to_all <= truth.intra.all_to_all
    assert "times what the link takes alone" in found.sources["all_to_all"]


def test_noise_gives_no_figure_of_nothing(truth):
    trials = make_trials(2, 64)
    noise = np.random.default_rng(1)
    for _ in range(3):
        noisy = [
            {phase: s * noise.lognormal(0, 1) for phase, s in times.items()}
            for times in predicted(truth, trials)
        ]
        found = fit(truth, trials, noisy, machine(truth))
        assert all(value > 1e-12 for name, value in vars(found).items() if name.endswith("_seconds"))
        assert max(found.read_bandwidth, found.update_bandwidth, found.stream_bandwidth) < 1e13


def test_what_is_kept_takes_no_longer_than_what_was_measured(truth):
    """A machine a thousand times as fast as the built-in profile, of which nothing but lookups is known."""
    trials = make_trials(2, 256)
    free = replace(truth, read_row_seconds=1e-30, read_bandwidth=1e30)
    seconds = predicted(free, trials)
    known = replace(truth, read_row_seconds=1e-5, read_bandwidth=1e7)
    found = fit(known, trials, seconds, machine(known))
    for there, here in zip(seconds, predicted(found, trials), strict=True):
        assert here["lookup"] < 3 * there["lookup"]
    assert "times the time: a whole phase took no more" in found.sources["read_row_seconds"]


def test_no_profile_comes_of_nothing(truth):
    with pytest.raises(ValueError, match=r"the 1 trials determine none.*\n?.*Run again on a machine"):
        fit(truth, make_trials(2, 64)[:1], [{}], machine(truth))
