import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshrec.data import DataError
from meshrec.data.log_columns import LogColumns
from meshrec.data.propose_log import propose_log


def proposed(tmp_path, **more):
    """What is proposed for 40 users with 10 different items each, one an hour."""
    rng = np.random.default_rng(0)
    columns = {
        "user": np.repeat(np.arange(40), 10),
        "item": np.concatenate([rng.permutation(60)[:10] for _ in range(40)]),
        "time": np.tile(np.arange(10) * 3600 + 1_700_000_000, 40),
    }
    pq.write_table(pa.table({**columns, **more}), tmp_path / "log.parquet")
    return propose_log(str(tmp_path / "log.parquet"), LogColumns())


def test_a_plain_log_needs_nothing(tmp_path):
    found = proposed(tmp_path)
    assert found.columns == LogColumns()
    assert (found.num_rows, found.num_users, found.num_items, found.history) == (400, 40, 60, 10)
    assert found.exclude_seen
    assert found.num_windows == 40
    assert found.reasons[-1] == "nine tenths of the users have at most 10 items"


@pytest.mark.parametrize(("factor", "unit"), [(1, "s"), (1000, "ms"), (1_000_000, "us"), (10**9, "ns")])
def test_the_unit_of_times_follows_from_their_size(tmp_path, factor, unit):
    times = np.tile(np.arange(10) * 3600 + 1_700_000_000, 40) * factor
    assert proposed(tmp_path, time=times).columns.time_unit == unit
    texts = pa.array(times // factor).cast(pa.timestamp("s")).cast(pa.string())
    assert proposed(tmp_path, time=texts).columns.time_unit == "s"


def test_ties_that_are_sorted_by_item_are_shuffled(tmp_path):
    times = np.repeat(np.arange(200), 2)
    items = np.sort(np.random.default_rng(0).permutation(60 * 10)[:400].reshape(200, 2) % 60, axis=1)
    found = proposed(tmp_path, time=times, item=items.reshape(-1))
    assert found.columns.ties == "shuffle"
    assert any("sorted by item: they are shuffled" in each for each in found.reasons)
    mixed = np.random.default_rng(1).permutation(400) % 60
    assert proposed(tmp_path, time=times, item=mixed).columns.ties == "keep"


def test_items_that_come_again_stay_candidates(tmp_path):
    found = proposed(tmp_path, item=np.tile(np.arange(5), 80))
    assert not found.exclude_seen
    assert any("50.0 % of the rows repeat an item of the user" in each for each in found.reasons)


def test_a_log_without_histories_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"0.*400 users"):
        proposed(tmp_path, user=np.arange(400))
