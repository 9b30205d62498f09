"""Steps from records that arrive in any order: all rows once, in order, and again the same."""

import numpy as np
import pytest

from meshrec.data.brokers import Records
from meshrec.data.faults import DataError
from meshrec.data.step_planner import Runs, StepPlanner

NAMES = ["a/0", "a/1", "b/0"]


def draw(seed):
    """Return records by partition, with row counts: one row, or some Arrow tables, maybe without rows."""
    rng = np.random.default_rng(seed)
    drawn = {}
    for name in NAMES:
        num = int(rng.integers(0, 60))
        ids = np.cumsum(rng.integers(1, 4, num)).tolist()
        times = rng.integers(0, 100, num).tolist()
        rows = rng.choice([0, 1, 1, 1, 2, 7, 30] if seed % 2 else [1], num).tolist()
        drawn[name] = (Records(ids, times, [f"{name}:{key}".encode() for key in ids]), rows)
    return drawn


def arrivals(drawn, position, rng):
    """Yield the records after a position in pieces, in random order."""
    pieces = []
    for name, (records, rows) in drawn.items():
        last = position[name][0] if name in position else -1
        first = int(np.searchsorted(records.ids, last, side="right"))
        cuts = np.sort(rng.integers(first, len(rows) + 1, 3)).tolist()
        for start, stop in zip([first, *cuts], [*cuts, len(rows)], strict=True):
            pieces.append((name, Records(*(field[start:stop] for field in records)), rows[start:stop]))
    # Pieces of a partition stay in order.
    order = rng.permutation([name for name, *_ in pieces])
    queues = {name: [piece for piece in pieces if piece[0] == name] for name in drawn}
    return [queues[name].pop(0) for name in order]


def run(drawn, position, step_rows, seed, repeated=()):
    """Plan until all records have arrived; return the rows and the position of every step."""
    planner = StepPlanner(position, step_rows, list(repeated))
    for name in NAMES:
        if name not in position:
            planner.add_partition(name, -1)
    steps, pending = [], arrivals(drawn, position, np.random.default_rng(seed))
    while pending:
        # A reader asks for what is needed only.
        at = next((k for k, (name, *_) in enumerate(pending) if planner.needs(name)), None)
        if at is None:
            break
        planner.add(*pending.pop(at))
        positions, runs = planner.plan()
        rows = flat(runs)
        assert len(rows) == step_rows * len(positions)
        steps += [(rows[k * step_rows : (k + 1) * step_rows], after) for k, after in enumerate(positions)]
    return steps


def flat(runs: Runs):
    return [
        (runs.partitions[k], runs.ids[k], row)
        for k in range(len(runs.ids))
        for row in range(runs.first_rows[k], runs.first_rows[k] + runs.num_rows[k])
    ]


@pytest.mark.parametrize("seed", range(12))
def test_every_row_is_in_one_step_and_partitions_stay_in_order(seed):
    drawn = draw(seed)
    steps = run(drawn, {}, 5, seed)
    found = [row for rows, _ in steps for row in rows]
    for name, (records, num_rows) in drawn.items():
        expected = [
            (name, key, row) for key, n in zip(records.ids, num_rows, strict=True) for row in range(n)
        ]
        of_name = [row for row in found if row[0] == name]
        assert of_name == expected[: len(of_name)]
    assert len(found) > sum(sum(rows) for _, rows in drawn.values()) - 5


@pytest.mark.parametrize("seed", range(12))
def test_steps_are_repeated_whatever_the_order_of_arrival(seed):
    drawn = draw(seed)
    steps = run(drawn, {}, 5, seed)
    for start in range(0, len(steps), 3):
        position = steps[start - 1][1] if start else {}
        repeated = [after for _, after in steps[start:]]
        assert run(drawn, position, 5, seed + 100, repeated) == steps[start:]
        # Without the log, no row is lost or repeated.
        other = run(drawn, position, 5, seed + 100)
        assert sorted(row for rows, _ in other for row in rows)[:1] == [] or len(other) == len(steps) - start


@pytest.mark.parametrize("seed", [1, 2])
def test_new_steps_follow_repeated_ones(seed):
    drawn = draw(seed)
    steps = run(drawn, {}, 5, seed)
    again = run(drawn, {}, 5, seed + 50, [after for _, after in steps[:4]])
    assert again[:4] == steps[:4]
    assert len(again) == len(steps)


def test_records_of_partitions_are_merged_by_time():
    planner = StepPlanner({}, 6, [])
    for name, times in (("a", [10, 30, 20]), ("b", [5, 25, 30])):
        planner.add_partition(name, -1)
        planner.add(name, Records([0, 1, 2], times, [b""] * 3), [1, 1, 1])
    (position,), runs = planner.plan()
    # A record is never before an earlier one of its partition, and at equal times names decide.
    assert [(a, b) for a, b, _ in flat(runs)] == [("b", 0), ("a", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert position == {"a": [2, 0, 30], "b": [2, 0, 30]}


@pytest.mark.parametrize("ids", [[1, 3], ["9-1", "10-0"]])
def test_a_logged_record_that_the_broker_lost_is_not_waited_for(ids):
    lost = ids[0]
    planner = StepPlanner({"a": [-1, 0, 0]}, 1, [{"a": [lost, 0, 0]}])
    planner.add("a", Records(ids[1:], [0], [b""]), [1])
    with pytest.raises(DataError, match=f"{lost}"):
        planner.plan()


def test_changed_records_cannot_be_repeated():
    planner = StepPlanner({"a": [-1, 0, 0]}, 2, [{"a": [1, 0, 0]}])
    planner.add("a", Records([0, 1], [0, 0], [b"", b""]), [1, 2])
    with pytest.raises(DataError, match="3"):
        planner.plan()
