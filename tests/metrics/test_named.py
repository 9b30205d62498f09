import math

from meshrec.metrics.named import leading_metric, leading_text, metric_of, metric_title, quality, shown


def test_names_of_metrics():
    assert [metric_title(name) for name in ("auc", "ndcg@10", "recall@5", "loss")] == [
        "AUC",
        "NDCG@10",
        "recall@5",
        "loss",
    ]
    assert metric_title("mine@3") == "mine@3"
    assert metric_of("ndcg@10").better == 1
    assert metric_of("normalized_entropy").better == -1
    assert metric_of("mine").better == 0


def test_the_metric_that_selects_weights_leads():
    clicks, ranking = {"loss": 0.5, "auc": 0.7}, {"loss": 2.0, "ndcg@10": 0.2}
    assert (leading_metric(clicks), leading_metric(ranking), leading_metric({"loss": 1.0})) == (
        "auc",
        "ndcg@10",
        None,
    )
    assert [leading_text(each) for each in (clicks, ranking, {"loss": 0.5}, {})] == [
        "AUC 0.7000",
        "NDCG@10 0.2000",
        "loss 0.5000",
        "-",
    ]
    assert [quality(each) for each in (clicks, ranking, {"loss": 3.0, "rmse": 1.7}, {"loss": 3.0})] == [
        0.7,
        0.2,
        -3.0,
        None,
    ]


def test_nan_never_selects_weights():
    assert quality({"loss": 0.5, "auc": math.nan}) == -math.inf
    assert quality({"loss": math.nan, "rmse": math.nan}) == -math.inf


def test_columns_of_results():
    assert shown({"auc": 0.7})[0] == "auc"
    assert shown({"ndcg@10": 0.2})[0] == "ndcg@10"
    assert "rmse" in shown({"rmse": 1.0, "loss": 1.0})
