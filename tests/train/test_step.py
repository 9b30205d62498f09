import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import meshrec
from meshrec.planner.measured import read_phases
from meshrec.runs.report import phase_times
from meshrec.train import DenseOptimizer, Placement, Trainer, join
from meshrec.train.observers import Stepped
from meshrec.train.recipes import synthetic_clicks
from meshrec.train.run_folder import RunFolder
from meshrec.train.steps import PhaseTimes


def weights_after(recipe, ranks) -> dict[str, torch.Tensor]:
    trainer = Trainer(recipe, recipe.data.load(), ranks)
    trainer.run()
    return trainer.built.model.state_dict()


def quality_after(recipe) -> dict[str, float]:
    return Trainer(recipe, recipe.data.load(), join("cpu")).run()


@pytest.fixture
def plain(small):
    """1000 samples in steps of 96 end each epoch with an odd one."""
    recipe = small(batch_size=96, epochs=2, placement=Placement(sharded=False))
    return replace(recipe, dense=DenseOptimizer(kind="sgd", lr=0.1))


@pytest.mark.parametrize("kinds", [("row_wise",), ("column_wise",), ("data_parallel",)])
def test_two_ranks_train_as_the_plain_model_does(ranks, plain, kinds):
    sharded = replace(plain, placement=Placement(sharding_types=kinds, min_partition=4))
    expected = pytest.approx(quality_after(plain), rel=1e-5)
    assert ranks(2).run(quality_after, sharded) == [expected, expected]


def compare_with_and_without_pipeline(recipes):
    for recipe in recipes:
        found = []
        for pipeline in (True, False):
            training = replace(recipe.training, pipeline=pipeline)
            trainer = Trainer(replace(recipe, training=training), recipe.data.load(), join("cpu"))
            found.append((trainer.run(), trainer.progress.step, trainer.built.model.state_dict()))
        (quality, step, weights), (expected, its_step, its_weights) = found
        assert quality == expected
        assert step == its_step
        for name, weight in weights.items():
            whole = [
                value.full_tensor() if hasattr(value, "full_tensor") else value
                for value in (weight, its_weights[name])
            ]
            assert torch.equal(*whole)


def test_the_pipeline_changes_no_number(ranks, small):
    """1000 samples: an epoch ends with a smaller batch, and with a group of fewer batches."""
    ways = [
        {"epochs": 2, "batch_size": 96},
        {"epochs": 2, "batch_size": 96, "accumulate": 3, "clip_norm": 0.1, "evaluate_every": 2},
        {"epochs": 2, "max_steps": 7, "dense_precision": "bf16", "accumulate": 2},
    ]
    ranks(2).run(compare_with_and_without_pipeline, [small(**way) for way in ways])


PACKAGE = str(Path(meshrec.__file__).parent)
POLLING = ("/comms/failures.py:__init__", "/comms/failures.py:check", "/comms/host_link.py:check")


def calls_of_step_8():
    """Train 9 steps, and return the Python functions of the package that the eighth one calls."""
    recipe = synthetic_clicks()
    data = replace(recipe.data, num_samples=100_000, num_validation=2000, num_test=2000)
    training = replace(recipe.training, max_steps=9)
    calls = []

    def count(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append(f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_code.co_name}")

    def observe(event):
        if isinstance(event, Stepped) and event.step in (7, 8):
            sys.setprofile(count if event.step == 7 else None)

    Trainer(replace(recipe, data=data, training=training), data.load(), join("cpu"), observer=observe).run()
    return calls


def test_a_pipelined_step_takes_few_python_calls(ranks):
    calls = ranks(2).run(calls_of_step_8)[0]
    # A rank that waits for another one polls. Since Python 3.12 comprehensions have no frames.
    calls = [call for call in calls if not call.startswith(POLLING) and not call.endswith("comp>")]
    assert 100 < len(calls) <= 350, f"{len(calls)} calls: {Counter(calls).most_common()}"


def phases_of_a_run(recipe, path):
    folder = RunFolder(path)
    Trainer(recipe, recipe.data.load(), join("cpu"), folder=folder).run()
    return phase_times(folder)


def test_a_run_says_what_its_pipeline_hides(ranks, small, tmp_path):
    recipe = small(epochs=1)
    found = ranks(2).run(phases_of_a_run, recipe, tmp_path)[0]
    assert [rank["rank"] for rank in found] == [0, 1]
    for rank in found:
        assert "ids" in rank["hidden"]
        assert rank["hidden"].keys() < rank["phases"].keys()
        assert min(rank["hidden"].values()) >= 0


@pytest.mark.parametrize(
    ("every", "hidden", "waiting"),
    [
        (1, [2, 4, 6], [3, 5, 7]),
        (2, [2, 4, 6], [3, 5, 7]),
        (3, [2, 5], [3, 6]),
        (4, [3, 7], [4]),
    ],
)
def test_phases_are_recorded_in_pairs_of_steps_of_a_pipeline(every, hidden, waiting, tmp_path):
    folder = RunFolder(tmp_path)
    times = PhaseTimes(every, folder, join("cpu"), is_pipelined=True)
    for step in range(7):
        with times.recording(step):
            pass
    times.write()
    for path, expected in ((folder.phases, hidden), (folder.whole_phases, waiting)):
        assert [time.step for time in read_phases(path)] == expected


def test_without_a_pipeline_every_step_may_be_recorded(tmp_path):
    folder = RunFolder(tmp_path)
    times = PhaseTimes(1, folder, join("cpu"), is_pipelined=False)
    for step in range(3):
        with times.recording(step):
            pass
    times.write()
    assert [time.step for time in read_phases(folder.phases)] == [1, 2, 3]
    assert not folder.whole_phases.exists()


def test_clipping_bounds_the_update(plain):
    before = weights_after(replace(plain, training=replace(plain.training, max_steps=1)), join("cpu"))
    clipped = replace(plain, training=replace(plain.training, max_steps=1, clip_norm=1e-3))
    after = weights_after(clipped, join("cpu"))
    recipe = replace(plain, dense=DenseOptimizer(kind="sgd", lr=0.0))
    first = weights_after(replace(recipe, training=replace(recipe.training, max_steps=1)), join("cpu"))

    def moved(weights):
        dense = [name for name in first if "embedding_bags" not in name]
        return torch.cat([(weights[name] - first[name]).flatten() for name in dense]).norm()

    rate = 0.1 / 3  # the first step of the warmup
    assert 0 < moved(after) <= 1.01e-3 * rate  # the tables have their share in the norm
    assert moved(before) > 2 * moved(after)
