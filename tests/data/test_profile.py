import numpy as np
import pyarrow as pa
import pytest

from meshrec.data.profile import profile


def test_what_columns_hold_is_counted_over_all_parts():
    rng = np.random.default_rng(0)
    n = 3000
    table = pa.table(
        {
            "y": rng.integers(0, 2, n),
            "row": np.arange(n),
            "x": pa.array(rng.normal(size=n), mask=np.arange(n) % 10 == 0),
            "name": [f"n{each}" if each else None for each in rng.integers(0, 50, n)],
            "tags": [[1] * (each % 4) for each in range(n)],
            "vector": [[0.5]] * n,
        }
    )
    found = profile([table.slice(0, 1300), table.slice(1300)], "y")
    assert found.num_rows == n
    columns = found.columns
    assert columns["row"].counts_up
    assert not columns["y"].counts_up
    assert columns["name"].distinct == 49
    assert columns["name"].num_missing == pa.compute.sum(table["name"].is_null()).as_py()
    assert columns["x"].num_missing == 300
    assert columns["x"].quantiles[3] == pytest.approx(0, abs=0.1)
    assert (columns["tags"].mean_length, columns["tags"].max_length) == (1.5, 3)
    assert columns["vector"].kind == "other"
    assert columns["x"].signal == pytest.approx(0.5, abs=0.05)
    assert columns["name"].signal == pytest.approx(0.5, abs=0.06)
    assert sum(columns["y"].top_shares) == pytest.approx(1)


def test_nothing_to_look_at():
    with pytest.raises(ValueError, match="look"):
        profile([], None)
