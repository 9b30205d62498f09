from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshrec.data.log_columns import LogColumns
from meshrec.testing import RankError
from meshrec.train import Log, join
from meshrec.train.recipe import RankFittedSource

COLUMNS = LogColumns(item_features=("brand", "tags"), min_user_count=2, min_item_count=2)


def random_log(rng: np.random.Generator, num: int) -> pa.Table:
    """Draw rows with rare users and items, equal counts, missing side values, and values of every type."""
    items = rng.zipf(1.3, num) % 300
    return pa.table(
        {
            "user": [f"u{user}" for user in rng.integers(0, num // 4, num)],
            "item": pa.array(items, pa.float64()) if rng.random() < 0.5 else pa.array(items),
            "time": rng.integers(0, 99, num),
            "brand": pa.array(items % 7, mask=rng.random(num) < 0.1),
            "tags": [[f"t{(item + tag) % 9}" for tag in range(item % 4)] for item in items.tolist()],
        }
    )


def fit(source: Log):
    """Return the fitted features on rank 0, and the dataset with these features and the reads on any rank."""
    reads = []
    read = Log.read

    def counted(self, *arguments):
        reads.append(self)
        return read(self, *arguments)

    Log.read = counted
    try:
        assert isinstance(source, RankFittedSource)
        ranks = join("cpu")
        features = source.fit_on_ranks(ranks.axis, lambda share: None)
        assert (features is None) == (ranks.rank > 0)
        features = ranks.broadcast(features)
        dataset = source.dataset(features)
    finally:
        Log.read = read
    batches = [batch.sparse.values().tolist() for batch in dataset.train.batches(16)]
    return features.to_json(), batches, len(reads)


@pytest.mark.parametrize("windows", [True, False])
@pytest.mark.parametrize("on_disk", [False, True])
def test_vocabularies_of_a_log_do_not_depend_on_the_number_of_ranks(on_disk, windows, tmp_path, ranks):
    rng = np.random.default_rng(0)
    for number in range(2):
        pq.write_table(random_log(rng, 1500), tmp_path / f"{number}.parquet")
    source = Log(log=(str(tmp_path),), columns=COLUMNS, history=5, windows=windows)
    features = source.fit()
    batches = [batch.sparse.values().tolist() for batch in source.dataset(features).train.batches(16)]
    for size in (1, 2, 3):
        built = tmp_path / f"built-{size}" if on_disk else None
        results = ranks(size).run(fit, replace(source, log=(f"{tmp_path}/*.parquet",), histories=built))
        # Every rank reads a log in memory once.
        assert results == [(features.to_json(), batches, 0 if on_disk else 1)] * size


def test_ranks_may_have_no_rows_of_a_log(tmp_path, ranks):
    rows = {"user": [1, 1], "item": ["a", "b"], "time": [1, 2]}
    pq.write_table(pa.table(rows), tmp_path / "log.parquet")
    source = Log(log=(str(tmp_path / "log.parquet"),), held_out="nothing")
    assert ranks(3).run(fit, source)[2][0] == source.fit().to_json()


@pytest.mark.parametrize("on_disk", [False, True])
def test_an_error_in_a_log_is_raised_on_all_ranks(on_disk, tmp_path, ranks):
    pq.write_table(pa.table({"user": [1], "item": [None], "time": [1]}), tmp_path / "log.parquet")
    source = Log(log=(str(tmp_path / "log.parquet"),), histories=tmp_path / "built" if on_disk else None)
    with pytest.raises(RankError, match="column 'item' has no value in row 0"):
        ranks(2).run(fit, source)
