from meshrec.train import Training
from meshrec.train.remarks import remarks

SUMMARY = {
    "state": "finished",
    "step": 100,
    "num_steps": 100,
    "best_step": 80,
    "validation": {"auc": 0.7},
    "test": {"auc": 0.68},
    "curves": {name: {"positive": 100.0, "negative": 900.0} for name in ("validation", "test")},
}


def said(*, training=Training(epochs=4), num_evaluations=5, **more):  # noqa: B008 - immutable
    return remarks(SUMMARY | more, training, num_evaluations)


def test_nothing_is_said_of_a_good_run():
    assert said() == []
    assert said(state="stopped", best_step=100, test={"auc": 0.4}) == []
    assert said(validation={"loss": 1.0, "rmse": 1.0}, test={}, curves={}) == []


def test_an_auc_that_may_be_chance_is_told():
    (text,) = said(validation={"auc": 0.58}, test={"auc": 0.45})
    assert text.startswith(
        "the test AUC of 0.4500 is no better than chance: with 100 positive and 900 negative"
    )
    assert "a guess has 0.5 +- 0.0609" in text
    (text,) = said(test={}, validation={"auc": 0.53})
    assert text.startswith("the validation AUC")
    assert said(test={"auc": 0.57}) == []


def test_a_run_that_ends_with_its_best_step_may_go_on():
    (text,) = said(best_step=100)
    assert text.endswith("it was still improving. Train longer: --training.epochs 8.")
    (text,) = said(best_step=100, training=Training(epochs=4, max_steps=100), validation={"ndcg@10": 0.1})
    assert "the best by validation NDCG@10" in text
    assert text.endswith("--training.max-steps 200.")
    assert said(best_step=100, num_evaluations=1) == []
    assert said(best_step=100, num_steps=200) == []  # it was early stopping that ended it


def test_sampled_users_have_an_interval():
    (text,) = said(test={"recall@10": 0.1, "ndcg@10": 0.05}, evaluated_users={"test": (20_000, 138_493)})
    assert "20,000 of 138,493 users" in text
    assert "0.1000 +- 0.0042" in text
    assert "--data.evaluated-users None" in text
