from dataclasses import replace

import numpy as np
import pytest

from meshrec.planner.estimators import PHASES
from meshrec.planner.evaluate import evaluate
from meshrec.planner.fit import fit
from meshrec.planner.trials import make_trials
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
    return replace(truth, intra=link, inter=link, read_bandwidth=1.0, update_id_seconds=1.0)


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


def test_what_was_not_measured_does_not_count(known):
    trials = make_trials(2, 64)[:1]
    found = fit(known, trials, [{"lookup": 1.0}], machine(known))
    assert predicted(found, trials)[0]["lookup"] == pytest.approx(1.0)
    assert found.intra.reduce_scatter <= 10 * known.intra.reduce_scatter * (1 + 1e-9)
    alone = replace(machine(known), world_size=1, local_world_size=1)
    assert fit(known, make_trials(1, 64)[:1], [{"update": 1.0}], alone).intra == known.intra
