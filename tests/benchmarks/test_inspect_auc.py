import pyarrow.parquet as pq

from benchmarks import inspect_auc as bench
from tests.train.shop import shop


def test_what_inspect_wrote_and_the_regression_judge_the_same_rows(tmp_path):
    pq.write_table(shop(1500), tmp_path / "shop.parquet")
    found = bench.measured(bench.proposed(tmp_path / "shop.parquet", tmp_path, "clicked"))
    assert list(found) == ["ours", "sklearn"]
    assert all(0.6 < each["low"] < each["auc"] < each["high"] for each in found.values())
    (bar,) = bench.bars_of(found)
    assert bar.asked == found["sklearn"]["auc"]
