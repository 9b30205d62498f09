import dataclasses

import pytest

from meshrec.optim import FTRL
from meshrec.train import Placement, Schedule, Training


def test_numbers_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"training.batch_size.*0.*1"):
        Training(batch_size=0)
    with pytest.raises(ValueError, match=r"training.clip_norm.*-1.*above 0"):
        Training(clip_norm=-1)


def test_what_these_ranks_cannot_run_is_refused(small):
    small(batch_size=100).check(2)
    with pytest.raises(ValueError, match=r"100.*among 3.*take 99.*102"):
        small(batch_size=100).check(3)
    with pytest.raises(ValueError, match=r"100 cannot be divided among 300 ranks; take 300\.$"):
        small(batch_size=100).check(300)
    with pytest.raises(ValueError, match=r"placement.sharded.*2 ranks"):
        small(placement=Placement(sharded=False)).check(2)
    with pytest.raises(ValueError, match="evaluation"):
        small(patience=1, max_steps=10, evaluate_every=20).check(1)


def test_rates_of_ftrl_do_not_end_at_none(small):
    recipe = dataclasses.replace(small(), tables=FTRL(lr=0.1))
    with pytest.raises(ValueError, match=r"schedule.decay.*'linear'.*0.*FTRL"):
        recipe.check(1)
    for schedule in (Schedule(), Schedule(decay="cosine", final=0.1)):
        dataclasses.replace(recipe, schedule=schedule).check(1)
