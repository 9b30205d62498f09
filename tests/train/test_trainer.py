from dataclasses import replace

import pytest
import torch

from meshrec.planner.measured import PHASES_FILE, read_phases
from meshrec.train import RunFolder, Trainer, join
from meshrec.train.observers import Evaluated, Logged, Reported, Started, Stepped
from meshrec.train.stopping import StopRequest


def trained(recipe, **options):
    events = []
    trainer = Trainer(recipe, recipe.data.load(), join("cpu"), observer=events.append, **options)
    return trainer, trainer.run(), events


def of(kind, events):
    return [event for event in events if isinstance(event, kind)]


def test_a_run_learns_and_tells(small):
    trainer, validation, events = trained(small(epochs=8))
    (start,) = of(Started, events)
    assert (start.num_steps, start.num_samples, start.num_validation) == (80, 1000, 400)
    assert start.num_table_parameters == 3 * 50 * 8
    assert [event.step for event in of(Stepped, events)] == list(range(1, 81))
    lines = [event.line for event in of(Logged, events)]
    assert [line["step"] for line in lines] == list(range(5, 81, 5))
    assert lines[-1]["loss"] < lines[0]["loss"]
    *evaluations, test = of(Evaluated, events)
    assert (test.line["kind"], test.line["step"]) == ("test", trainer.evaluator.weights_step)
    assert trainer.test["auc"] == test.line["auc"]
    assert [event.line["step"] for event in evaluations] == list(range(10, 81, 10))
    assert validation["auc"] == max(event.line["auc"] for event in evaluations) > 0.6
    assert trainer.progress.position == (8, 0)


def test_steps_are_limited_and_the_end_is_judged(small):
    trainer, validation, events = trained(small(max_steps=7, epochs=3, evaluate_every=3))
    assert trainer.progress.step == 7
    evaluations = [event.line for event in of(Evaluated, events) if event.line["kind"] == "validation"]
    assert [line["step"] for line in evaluations] == [3, 6, 7]
    assert validation["auc"] == max(line["auc"] for line in evaluations)


def test_early_stopping_takes_the_best_weights(small):
    recipe = replace(small(epochs=40, patience=3, evaluate_every=10))
    trainer, validation, events = trained(recipe)
    assert trainer.progress.step < trainer.num_steps
    best = max(event.line["auc"] for event in of(Evaluated, events) if event.line["kind"] == "validation")
    assert validation["auc"] == pytest.approx(best, abs=1e-12)
    assert trainer.evaluator.early.best_auc == best
    assert "the best by validation AUC" in of(Reported, events)[0].text


def fruitless(small, **training):
    """Return a recipe whose tables and dense part learn nothing."""
    recipe = small(**({"epochs": 8, "evaluate_every": 5, "chance_patience": 3} | training))
    return replace(recipe, tables=replace(recipe.tables, lr=0.0), dense=replace(recipe.dense, lr=0.0))


def test_training_that_does_not_pay_ends_and_says_why(small):
    trainer, _, events = trained(fruitless(small))
    assert (trainer.progress.step, trainer.num_steps) == (20, 80)
    assert trainer.ended_because in [event.text for event in of(Reported, events)]
    assert "step 20 of 80" in trainer.ended_because
    assert "paired test of 400 samples" in trainer.ended_because
    whole, _, events = trained(fruitless(small, chance_patience=None))
    assert whole.progress.step == 80
    assert of(Reported, events)[-1].text == "training made all 80 steps."


def test_training_that_pays_goes_on(small):
    trainer, _, _ = trained(small(epochs=2, evaluate_every=5, chance_patience=2))
    assert trainer.progress.step == trainer.num_steps


def test_losses_that_queries_share_are_not_tested(small, monkeypatch):
    recipe = fruitless(small)
    monkeypatch.setattr(type(recipe.loss), "per_sample", lambda *_: None)
    assert trained(recipe)[0].progress.step == 80


def steps_of(recipe):
    trainer = Trainer(recipe, recipe.data.load(), join("cpu"))
    trainer.run()
    return trainer.progress.step, trainer.evaluator.early.test.state_dict()["losses"]


def test_ranks_test_the_same_samples_in_the_same_order(small, ranks):
    recipe = fruitless(small)
    step, losses = steps_of(recipe)
    for step_of_two, losses_of_two in ranks(2).run(steps_of, recipe):
        assert step_of_two == step
        torch.testing.assert_close(losses_of_two, losses, rtol=1e-4, atol=1e-5)


def test_a_stop_request_ends_the_run_at_the_next_step(small):
    stop = StopRequest()
    recipe = small(epochs=5)

    def observer(event):
        if isinstance(event, Stepped) and event.step == 4:
            stop.signal = 2

    trainer = Trainer(recipe, recipe.data.load(), join("cpu"), observer=observer, stop=stop)
    trainer.run()
    assert trainer.stopped
    assert trainer.progress.step == 4


def test_whatever_is_saved_was_told_of(small, tmp_path):
    stop, steps = StopRequest(), []

    def observer(event):
        if isinstance(event, Logged):
            steps.append(event.line["step"])
        if isinstance(event, Stepped) and event.step == 16:
            stop.signal = 2

    recipe = small(epochs=5, checkpoint_every=7)
    Trainer(
        recipe, recipe.data.load(), join("cpu"), observer=observer, stop=stop, folder=RunFolder(tmp_path)
    ).run()
    assert steps == [5, 7, 10, 14, 15, 16]


def run_in(folder, recipe) -> dict[str, float]:
    return Trainer(recipe, recipe.data.load(), join("cpu"), folder=RunFolder(folder)).run()


def test_two_ranks_agree_and_record_their_phases(ranks, tmp_path, small):
    first, second = ranks(2).run(run_in, tmp_path, small(epochs=1))
    assert first == second
    _, alone, _ = trained(small(epochs=1))
    assert first["auc"] == pytest.approx(alone["auc"], abs=1e-3)
    times = read_phases(tmp_path / PHASES_FILE)
    assert {(time.rank, time.step) for time in times} == {(0, 3), (1, 3), (0, 7), (1, 7)}
    assert {"lookup", "update", "dense"} <= {time.phase for time in times}


def test_accumulated_batches_are_one_batch(small):
    recipe = small(batch_size=100, epochs=1)
    split = replace(recipe, training=replace(recipe.training, batch_size=50, accumulate=2))
    (one, _, _), (two, _, _) = trained(recipe), trained(split)
    assert one.progress.state_dict() | {"seconds": 0} == two.progress.state_dict() | {"seconds": 0}
    for name, value in one.built.model.state_dict().items():
        torch.testing.assert_close(value, two.built.model.state_dict()[name], rtol=1e-4, atol=1e-6)


def test_a_resumed_run_ends_as_if_it_had_never_stopped(small, tmp_path):
    recipe = small(epochs=3, checkpoint_every=7, patience=5, chance_patience=2)
    for name in ("whole", "parts", "empty"):
        (tmp_path / name).mkdir()
    expected, whole, _ = trained(recipe, folder=RunFolder(tmp_path / "whole"))
    stop, folder = StopRequest(), RunFolder(tmp_path / "parts")

    def observer(event):
        if isinstance(event, Stepped) and event.step == 16:
            stop.signal = 15

    Trainer(recipe, recipe.data.load(), join("cpu"), observer=observer, stop=stop, folder=folder).run()
    again = Trainer(recipe, recipe.data.load(), join("cpu"), folder=folder)
    assert again.resume()
    assert again.progress.step == 16
    assert again.run() == whole
    for name, value in expected.built.model.state_dict().items():
        assert torch.equal(value, again.built.model.state_dict()[name]), name
    assert not Trainer(recipe, recipe.data.load(), join("cpu"), folder=RunFolder(tmp_path / "empty")).resume()


def test_the_state_is_one_mapping(small):
    trainer, _, _ = trained(small(epochs=1))
    assert set(trainer.saver.state) == {
        "model",
        "table_optimizer",
        "dense_optimizer",
        "progress",
        "early_stopping",
    }
