import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshrec.checkpoint import CheckpointError, RowTracker, delta
from meshrec.checkpoint.tables import read_weights

_spec = importlib.util.spec_from_file_location("checkpoint_models", Path(__file__).parent / "models.py")
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)


def tables(model):
    return models.whole({n: v for n, v in model.state_dict().items() if n.startswith("ebc")})


def changes(kind, folder):
    """What was exported, and the tables before and after."""
    model, optimizer = models.make(kind)
    models.train(model, optimizer, range(2))
    tracker = RowTracker(model)
    assert tracker.first_step == 2
    models.train(model, optimizer, range(2, 3))
    middle = tables(model)
    models.train(model, optimizer, range(3, 5))
    counts = tracker.export(folder / "delta.safetensors", since=3)
    with pytest.raises(ValueError, match=r"update 2.*since=1"):
        tracker.export(folder / "other", since=1)
    nothing = tracker.export(folder / "nothing.safetensors", since=tracker.step)
    after = tables(model)
    model.reshard(models.make_plan("cw"))
    with pytest.raises(ValueError, match="resharded"):
        tracker.export(folder / "other", since=3)
    return counts, nothing, middle, after


@pytest.mark.parametrize("kind", ["cw", "grid", "dp", "mix"])
def test_touched_rows_bring_an_old_copy_up_to_date(ranks, tmp_path, kind):
    counts, nothing, copy, after = ranks(2).run(changes, kind, tmp_path)[0]
    found = read_weights(tmp_path / "delta.safetensors")
    looked_up = {name: set() for name in models.SIZES}
    for step in (3, 4):
        batch = models.batch(step)  # this process alone: the batch of all ranks
        for name in looked_up:
            looked_up[name] |= set(batch[f"f{name}"].values().tolist())
    for name, ids in looked_up.items():
        full = f"ebc.embedding_bags.{name}.weight"
        assert found[f"{full}.ids"].tolist() == sorted(ids)
        assert counts.rows[full] == len(ids)
        copy[full][found[f"{full}.ids"]] = found[f"{full}.rows"]
    assert models.differences(copy, after) == []
    assert nothing.rows == nothing.evicted == {}
    assert read_weights(tmp_path / "nothing.safetensors") == {}


def test_without_a_tracker_nothing_is_watched(ranks):
    assert ranks(2).run(unwatched) == [True, True]


def unwatched():
    model, _ = models.make("rw")
    return all(module.tables.watch is None for module in model.sharded_modules.values())


def test_rows_of_data_parallel_tables_are_the_same_everywhere(ranks):
    first, second = ranks(2).run(marked)
    assert first == second


def marked():
    model, optimizer = models.make("dp")
    tracker = RowTracker(model)
    models.train(model, optimizer, range(1))
    return [rows.tolist() for _, own, _ in tracker._pieces(0, {}) for rows, *_ in own.pieces]


def failed_exports(kind, folder):
    """What the ranks raise if rank 1 cannot read its rows, or cannot join those of all ranks."""
    model, optimizer = models.make("rw")
    tracker = RowTracker(model)
    models.train(model, optimizer, range(1))

    def fail(*_):
        raise kind("row 7")

    caught = []
    for name in ("_fixed_rows", "_join_columns"):
        before = getattr(delta, name)
        if dist.get_rank() == 1:
            setattr(delta, name, fail)
        try:
            tracker.export(folder / "delta.safetensors", since=0)
        except Exception as error:
            caught.append((type(error), str(error)))
        setattr(delta, name, before)
    return caught, tracker.export(folder / "delta.safetensors", since=0).rows


@pytest.mark.parametrize(
    ("kind", "expected", "text"),
    [
        (ValueError, ValueError, "row 7 (rank 1)"),
        (MemoryError, CheckpointError, "MemoryError: row 7 (rank 1)"),
    ],
)
def test_an_export_that_fails_on_one_rank_fails_on_all(ranks, tmp_path, kind, expected, text):
    first, second = ranks(2).run(failed_exports, kind, tmp_path)
    assert first == second
    caught, names = first
    assert [error for error, _ in caught] == [expected] * 2
    assert all(message.endswith(text) for _, message in caught)
    assert len(names) == len(models.SIZES)


def test_an_empty_export_is_a_file_of_nothing(tmp_path):
    model, _ = models.make("tw")
    assert RowTracker(model).export(tmp_path / "a.safetensors", since=0).rows == {}
    assert torch.equal(torch.tensor(len(read_weights(tmp_path / "a.safetensors"))), torch.tensor(0))
