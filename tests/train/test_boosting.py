from dataclasses import replace

import pytest
import torch

from meshrec.metrics import area_under_curve
from meshrec.modules.boosted_trees import BoostedTrees
from meshrec.optim import Adam
from meshrec.train import Trainer, WideDeepConfig, join
from meshrec.train.boosting import NUM_LEVELS, TreeSamples, fit_boosted, refit_boosted, row_scores
from meshrec.train.linear import LabelledSamples, design_matrix, first_samples, fit_regression
from meshrec.train.wide_deep import _fit_initial_values, _out_of_fold_samples, _table_row_scores, _tree_inputs
from tests.train.raw_ids import recipe as visits_recipe
from tests.train.raw_ids import write_visits

lightgbm = pytest.importorskip("lightgbm")


def crossed(num, seed):
    """Samples whose label is a product of signs, which no linear model learns."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num, 3, generator=generator)
    chance = torch.sigmoid(2 * torch.sign(inputs[:, 0] * inputs[:, 1]))
    labels = (torch.rand(num, generator=generator) < chance).float()
    return TreeSamples(inputs, labels, torch.zeros(num, dtype=torch.float64), torch.ones(num))


def test_trees_add_what_the_model_leaves_over_and_the_module_sums_them():
    train, judged = crossed(4000, 0), crossed(2000, 1)
    share, bias, trees, counts = fit_boosted(train, judged, 100, seed=0)
    assert share == 0.5
    assert sum(counts) == len(trees)
    assert bias == pytest.approx(0.5 * float(torch.logit(train.labels.mean())), abs=1e-4)
    assert 0 < len(trees) <= 100
    module = BoostedTrees(100, NUM_LEVELS)
    module.set_trees(trees)
    assert area_under_curve(module(judged.inputs), judged.labels) > 0.85


def test_trees_that_know_less_than_the_model_are_left_out():
    generator = torch.Generator().manual_seed(0)
    train, judged = crossed(1000, 0), crossed(1000, 1)
    known = [
        0.01 * (each.labels + torch.randn(1000, generator=generator)).double() for each in (train, judged)
    ]
    # The first input tells the label, but only in training.
    told = torch.cat([train.labels[:, None], train.inputs[:, 1:]], dim=1)
    share, bias, trees, counts = fit_boosted(
        train._replace(inputs=told, logits=known[0]), judged._replace(logits=known[1]), 20, seed=0
    )
    assert (share, bias, trees, counts) == (1.0, 0.0, [], (0, 0))


@pytest.mark.parametrize("counts", [(7, 4), (3, 0), (0, 0)])
def test_as_many_trees_as_were_chosen_learn_from_all_samples(counts):
    train = crossed(1000, 0)
    found = refit_boosted(train, counts, seed=0)
    assert found.counts == counts
    assert len(found.trees) == sum(counts)
    assert found.share == (0.5 if counts[1] else 1.0)


def test_thresholds_are_rounded_down_so_that_no_sample_changes_sides():
    low = torch.tensor(0.1)
    high = torch.nextafter(low, torch.tensor(1.0))
    inputs = torch.where(torch.arange(200) % 2 == 0, low, high)[:, None]
    labels = (torch.arange(200) % 2).float()
    samples = TreeSamples(inputs, labels, torch.zeros(200, dtype=torch.float64), torch.ones(200))
    module = BoostedTrees(5, NUM_LEVELS)
    module.set_trees(fit_boosted(samples, samples, 5, seed=0).trees)
    assert area_under_curve(module(inputs), labels) == 1.0


def test_no_trees_where_they_gain_nothing_or_no_auc_exists():
    train, judged = crossed(400, 0), crossed(400, 1)
    sure = judged._replace(logits=judged.labels.double())
    none = (1.0, 0.0, [], (0, 0))
    assert fit_boosted(train, sure, 1, seed=0) == none
    assert fit_boosted(train, judged._replace(labels=torch.ones(400)), 20, seed=0) == none


def test_labels_between_0_and_1_are_refused():
    train, judged = crossed(400, 0), crossed(400, 1)
    with pytest.raises(ValueError, match=r"labels 0.*1.*0\.25"):
        fit_boosted(train._replace(labels=torch.full((400,), 0.25)), judged, 20, seed=0)


def test_scores_are_smoothed_log_odds_and_0_for_rare_rows():
    ids = torch.tensor([0] * 40 + [1] * 9)
    labels = torch.tensor([1.0] * 30 + [0.0] * 19)
    mean = 30 / 49
    expected = torch.logit(torch.tensor((30 + 20 * mean) / 60)) - torch.logit(torch.tensor(mean))
    assert torch.allclose(
        row_scores(ids, labels, torch.ones(49), 3), torch.tensor([float(expected), 0.0, 0.0])
    )


def with_trees(recipe):
    return replace(
        recipe, model=WideDeepConfig(fit_wide=True, fit_trees=30, layers=(8,)), tables=Adam(lr=0.01)
    )


def begun(recipe):
    trainer = Trainer(recipe, recipe.data.load(), join("cpu"))
    assert recipe.model.start(trainer.built.model, recipe, trainer.dataset, trainer.ranks)
    scored = torch.cat([each.logits_B for each in trainer.predict(trainer.dataset.validation)])
    trees = [each for each in trainer.built.model.modules() if isinstance(each, BoostedTrees)]
    return scored, [each.values.clone() for each in trees]


def test_a_model_begins_as_regression_and_trees_alike_on_all_ranks(small, ranks):
    recipe = with_trees(small())
    data = replace(recipe.data, num_samples=4000)
    recipe = replace(recipe, data=data)
    alone, (values,) = begun(replace(recipe, placement=replace(recipe.placement, sharded=False)))
    assert values.abs().sum() > 0
    dataset = recipe.data.load()
    model = recipe.model.build(dataset)
    found = _fit_initial_values(model, dataset, recipe.model, recipe.training.seed)
    samples = first_samples(dataset.validation)
    model.trees.set_trees(found.trees)
    added = model.trees(_tree_inputs(dataset, samples, found.scores))
    encoded = torch.cat([samples.dense, samples.dense], 1)  # a number without bins is encoded as it is
    linear = torch.from_numpy(design_matrix(dataset, samples, encoded) @ found.linear.double().numpy())
    assert torch.allclose(alone, (linear + added).float(), atol=1e-4)
    parts = ranks(2).run(begun, recipe)
    assert torch.allclose(torch.cat([each for each, _ in parts]).sort()[0], alone.sort()[0], atol=1e-4)
    assert all(torch.equal(each, values) for _, (each,) in parts)


def test_what_trees_learn_from_has_not_seen_the_samples_own_labels(small):
    dataset = replace(small().data, num_samples=1000).load()
    samples = first_samples(dataset.train)
    data = design_matrix(dataset, samples, samples.dense)
    found = fit_regression(LabelledSamples.of(samples, data))
    first = torch.arange(1000) % 4 == 0
    other = replace(samples, labels=torch.where(first, 1 - samples.labels, samples.labels))
    before, after = (
        _out_of_fold_samples(
            dataset, each, LabelledSamples.of(each, data), found, torch.ones(1000, dtype=torch.bool)
        )
        for each in (samples, other)
    )
    for one, two in ((before.inputs, after.inputs), (before.logits, after.logits)):
        assert torch.equal(one[first], two[first])
        assert not torch.equal(one[~first], two[~first])


def test_training_leaves_scores_and_trees_as_they_were_fitted(small):
    recipe = with_trees(small(epochs=1))
    recipe = replace(recipe, placement=replace(recipe.placement, sharded=False))
    trainer = Trainer(recipe, recipe.data.load(), join("cpu"))
    assert recipe.model.start(trainer.built.model, recipe, trainer.dataset, trainer.ranks)
    kept = lambda: {  # noqa: E731
        name: (value if "trees" in name else value[:, 1]).clone()
        for name, value in trainer.built.model.state_dict().items()
        if "trees" in name or "embedding_bags" in name
    }
    before = kept()
    trainer.run()
    after = kept()
    assert len(before) > 3
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_without_validation_data_every_tenth_sample_chooses(small):
    recipe = with_trees(small())
    dataset = replace(replace(recipe.data, num_samples=2000).load(), validation=None)
    found = _fit_initial_values(recipe.model.build(dataset), dataset, recipe.model, 0)
    assert len(found.scores) == len(dataset.tables(1))
    samples = first_samples(dataset.train)
    learns = torch.arange(len(samples)) % 10 != 9
    expected = _table_row_scores(dataset, samples, learns)
    assert all(map(torch.equal, found.scores, expected))
    assert not all(map(torch.equal, expected, _table_row_scores(dataset, samples, learns | True)))


def test_hashed_tables_have_no_scores(tmp_path):
    write_visits(tmp_path, 600)
    recipe = visits_recipe()
    data = replace(recipe.data, train=(str(tmp_path / "all.parquet"),))
    recipe = with_trees(replace(recipe, data=data))
    trainer = Trainer(recipe, data.load(), join("cpu"))
    trainer.run()
    assert trainer.evaluator.early.best_auc > 0.5


def test_contradictions_are_refused(small):
    with pytest.raises(ValueError, match=r"model\.fit_trees.*3.*model\.fit_wide"):
        WideDeepConfig(fit_trees=3)
    with pytest.raises(ValueError, match=r"model\.fit_trees.*-1.*0"):
        WideDeepConfig(fit_trees=-1)
    recipe = replace(with_trees(small()), tables=Adam(lr=0.01, weight_decay=0.1))
    trainer = Trainer(recipe, recipe.data.load(), join("cpu"))
    with pytest.raises(ValueError, match=r"tables\.weight_decay.*0\.1"):
        trainer.run()
