from dataclasses import replace

import pytest
import torch

from meshrec.metrics import auc_interval
from meshrec.train import SquaredError, Trainer, WideDeepConfig, join
from meshrec.train.linear import LabelledSamples, design_matrix, first_samples, fit_regression
from meshrec.train.observers import Evaluated, Stepped
from tests.train.raw_ids import recipe as visits_recipe
from tests.train.raw_ids import write_visits


def test_numbers_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"model\.dropout.*1.*\[0.*1"):
        WideDeepConfig(dropout=1)
    with pytest.raises(ValueError, match=r"model\.layers"):
        WideDeepConfig(layers=())
    with pytest.raises(ValueError, match=r"model\.members.*0.*1"):
        WideDeepConfig(members=0)


def test_a_lookup_is_pulled_by_how_rarely_a_value_occurs(small):
    dataset = replace(small().data, num_samples=1000).load()
    model = WideDeepConfig(shrinkage=2.0, wide_scale=3.0).build(dataset)
    expected = [2.0 * each.num_embeddings / 1000 / each.average_length for each in dataset.features]
    assert torch.allclose(model.shrink[:, 1], torch.tensor(expected))
    assert torch.allclose(model.shrink[:, 0], 9 * torch.tensor(expected))
    assert not WideDeepConfig().build(dataset).shrinks


@pytest.mark.parametrize("members", [1, 3])
def test_members_learn_and_score_as_one(small, members):
    recipe = replace(small(epochs=4), model=WideDeepConfig(members=members))
    trainer = Trainer(recipe, recipe.data.load(), join("cpu"))
    trainer.run()
    assert trainer.validation["auc"] > 0.6
    scored = next(iter(trainer.predict(trainer.dataset.validation)))
    assert scored.logits_B.dim() == 1


def fitted(recipe):
    trainer = Trainer(recipe, recipe.data.load(), join("cpu"))
    assert recipe.model.start(trainer.built.model, recipe, trainer.dataset, trainer.ranks)
    logits = [each.logits_B for each in trainer.predict(trainer.dataset.validation)]
    return torch.cat(logits)


def test_a_fitted_model_begins_as_the_regression_that_was_fitted(small, ranks):
    recipe = replace(small(), model=WideDeepConfig(fit_wide=True, wide_scale=2.0, members=2))
    dataset = recipe.data.load()
    train, validation = first_samples(dataset.train), first_samples(dataset.validation)
    data = [
        LabelledSamples.of(each, design_matrix(dataset, each, torch.cat([each.dense, each.dense], 1)))
        for each in (train, validation)  # a number without bins is encoded as it is
    ]
    expected = torch.from_numpy(data[1].inputs @ fit_regression(*data).weights).float()
    alone = fitted(replace(recipe, placement=replace(recipe.placement, sharded=False)))
    assert torch.allclose(alone, expected, atol=1e-4)
    parts = ranks(2).run(fitted, recipe)
    assert torch.allclose(torch.cat(parts).sort()[0], expected.sort()[0], atol=1e-4)


def broadcast(recipe):
    trainer = Trainer(recipe, recipe.data.load(), join("cpu"))
    parallel = trainer.built.model._dmp_wrapped_module
    return len(list(parallel.module.buffers())), parallel.modules_buffers


def test_no_training_step_broadcasts_the_trees(small, ranks):
    pytest.importorskip("lightgbm")
    model = WideDeepConfig(fit_wide=True, fit_trees=5, shrinkage=1.0)
    for num_buffers, sent in ranks(2).run(broadcast, replace(small(), model=model)):
        assert num_buffers >= 9
        assert sent == []


def test_the_fitted_weights_are_kept_unless_training_finds_better_ones(small):
    recipe = replace(small(epochs=2), model=WideDeepConfig(fit_wide=True))
    steps = []

    def observer(event):
        if isinstance(event, Evaluated):
            steps.append((event.line["kind"], event.line["step"], event.line["auc"]))

    trainer = Trainer(recipe, recipe.data.load(), join("cpu"), observer=observer)
    validation = trainer.run()
    assert steps[0][:2] == ("validation", 0)
    assert validation["auc"] == max(auc for kind, _, auc in steps if kind == "validation")


def test_only_a_label_of_0_and_1_is_fitted(small):
    recipe = replace(small(), model=WideDeepConfig(fit_wide=True), loss=SquaredError())
    trainer = Trainer(recipe, recipe.data.load(), join("cpu"))
    with pytest.raises(ValueError, match=r"model\.fit_wide.*SquaredError"):
        trainer.run()


def test_later_weights_must_be_better_by_more_than_chance(small):
    recipe = replace(small(), model=WideDeepConfig(fit_wide=True))
    trainer = Trainer(recipe, recipe.data.load(), join("cpu"))
    trainer.evaluator.validate(0)
    first = trainer.validation["auc"]
    assert trainer.evaluator.early.best_auc == first
    trainer.evaluator.favor_current()
    (batch,) = trainer.dataset.validation.batches(400)
    positive = float(batch.labels.sum())
    low, high = auc_interval(first, positive, 400 - positive)
    assert trainer.evaluator.early.best_auc == pytest.approx(first + 0.08 * (high - low))


def test_hashed_tables_are_left_out_of_the_fit(tmp_path):
    write_visits(tmp_path, 600)
    recipe = visits_recipe()
    data = replace(recipe.data, train=(str(tmp_path / "all.parquet"),))
    recipe = replace(recipe, data=data, model=WideDeepConfig(fit_wide=True))
    trainer = Trainer(recipe, data.load(), join("cpu"))
    trainer.run()
    assert trainer.evaluator.early.best_auc > 0.5


@pytest.mark.parametrize(("batch_size", "expected"), [(100, 1), (2048, 2), (1 << 13, 3)])
def test_small_batches_take_few_threads(small, batch_size, expected):
    recipe = replace(small(batch_size=batch_size, max_steps=1), model=WideDeepConfig(layers=(8,)))
    seen = []

    def observe(event):
        if isinstance(event, Stepped):
            seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        Trainer(recipe, recipe.data.load(), join("cpu"), observer=observe).run()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == [expected]
