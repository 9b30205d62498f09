import importlib.util
import time
from pathlib import Path

import pytest
import torch

from meshrec.checkpoint import (
    DeltaError,
    DeltaPublisher,
    Published,
    load,
    save,
    verify_deltas,
)
from meshrec.checkpoint.delta_files import delta_records, read_delta

_spec = importlib.util.spec_from_file_location("checkpoint_models", Path(__file__).parent / "models.py")
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)


def state(model):
    return models.whole(model.state_dict())


def published(folder):
    """Deltas of two publishers, one after the other; the weights before and after."""
    model, optimizer = models.make("mix")
    models.train(model, optimizer, range(1))
    before = state(model)
    first = DeltaPublisher(model, folder, run="r", step=1)
    first.publish(1)  # nothing was done since
    models.train(model, optimizer, range(1, 3))
    first.publish(3)
    second = DeltaPublisher(model, folder, run="r", step=3)
    models.train(model, optimizer, range(3, 4))
    second.publish(4)
    return before, state(model)


def went_back(folder):
    """Deltas of a training that goes back to a checkpoint, and on otherwise; as `published`."""
    model, optimizer = models.make("mix")
    models.train(model, optimizer, range(1))
    before, kept = state(model), {"model": model, "tables": model.fused_optimizer, "dense": optimizer}
    first = DeltaPublisher(model, folder / "deltas", run="r", step=1)
    models.train(model, optimizer, range(1, 2))
    first.publish(2)
    save(folder / "kept", kept)
    after = first.last
    models.train(model, optimizer, range(2, 5))
    first.publish(5)
    load(folder / "kept", kept)
    second = DeltaPublisher(model, folder / "deltas", run="r", step=2, after=after)
    models.train(model, optimizer, range(7, 8))
    second.publish(3)
    return before, state(model)


def test_a_delta_takes_back_what_is_done_again(ranks, tmp_path):
    before, after = ranks(2).run(went_back, tmp_path)[0]
    records = verify_deltas(tmp_path / "deltas")
    assert [(each.number, each.since, each.step) for each in records] == [(1, 1, 2), (2, 2, 5), (3, 2, 3)]
    assert any(records[1].rows[name] < number for name, number in records[2].rows.items())
    for record in records:
        put(before, read_delta(tmp_path / "deltas", record))
    for name, tensor in after.items():
        assert torch.equal(before[name], tensor), name


def held(folder):
    """Deltas of a training that saves a checkpoint without a delta, and goes on from it; as `published`."""
    model, optimizer = models.make("mix")
    models.train(model, optimizer, range(1))
    before, kept = state(model), {"model": model, "tables": model.fused_optimizer, "dense": optimizer}
    first = DeltaPublisher(model, folder / "deltas", run="r", step=1)
    models.train(model, optimizer, range(1, 2))
    first.publish(2)
    for step in range(2, 5):
        models.train(model, optimizer, range(step, step + 1))
        save(folder / f"step{step}", kept)
        repeated = first.unpublished_ids()
    load(folder / "step4", kept)
    # Held back, killed and continued twice.
    second = DeltaPublisher(model, folder / "deltas", run="r", step=2, after=first.last, unpublished=repeated)
    models.train(model, optimizer, range(5, 6))
    repeated = second.unpublished_ids()
    third = DeltaPublisher(model, folder / "deltas", run="r", step=2, after=first.last, unpublished=repeated)
    assert not third.is_current(6)
    third.publish(6)
    assert third.is_current(6)
    return before, state(model)


def test_changes_of_a_checkpoint_without_a_delta_are_in_the_next_delta(ranks, tmp_path):
    before, after = ranks(2).run(held, tmp_path)[0]
    records = verify_deltas(tmp_path / "deltas")
    assert [(record.since, record.step) for record in records] == [(1, 2), (2, 6)]
    for record in records:
        put(before, read_delta(tmp_path / "deltas", record))
    for name, tensor in after.items():
        assert torch.equal(before[name], tensor), name


def test_deltas_go_on_where_those_before_were_taken_away(tmp_path):
    model, optimizer = models.make("rw")
    publisher = DeltaPublisher(model, tmp_path, run="r", step=5, after=Published(7, "x"))
    models.train(model, optimizer, range(1))
    publisher.publish(6)
    (record,) = delta_records(tmp_path)
    assert (record.number, record.previous, record.since) == (8, "x", 5)
    models.train(model, optimizer, range(1, 2))
    DeltaPublisher(model, tmp_path, run="r", step=7, after=publisher.last)  # rows of step 7 are in no delta
    models.train(model, optimizer, range(2, 3))
    late = DeltaPublisher(model, tmp_path, run="r", step=7, after=publisher.last)
    models.train(model, optimizer, range(3, 4))
    late.publish(8)
    with pytest.raises(DeltaError, match=r"step 6.*delta 9.*7"):
        verify_deltas(tmp_path)


def test_deltas_that_must_be_taken_back_and_are_missing_are_named(tmp_path):
    model, optimizer = models.make("rw")
    publisher = DeltaPublisher(model, tmp_path, run="r", step=0)
    for step in range(3):
        models.train(model, optimizer, range(step, step + 1))
        publisher.publish(step + 1)
    first = delta_records(tmp_path)[0].published
    (tmp_path / "00000002.json").unlink()
    missing = r"deltas from 2 to 3 are missing"
    with pytest.raises(ValueError, match=missing):
        DeltaPublisher(model, tmp_path, run="r", step=1, after=first)
    damaged = tmp_path / "00000003.rows.safetensors"
    damaged.write_bytes(damaged.read_bytes() + b"x")
    with pytest.raises(ValueError, match="delta 3"):
        DeltaPublisher(model, tmp_path, run="r", step=1)


def put(weights, delta):
    for name, (ids, rows) in delta.rows.items():
        weights[name][ids] = rows
    for name, tensor in delta.whole.items():
        weights[name] = tensor.clone()


def test_deltas_bring_weights_up_to_date_and_are_verified(ranks, tmp_path):
    before, after = ranks(2).run(published, tmp_path)[0]
    records = verify_deltas(tmp_path)
    assert [(each.number, each.since, each.step) for each in records] == [(1, 1, 3), (2, 3, 4)]
    for record in records:
        delta = read_delta(tmp_path, record)
        put(before, delta)
        assert record.rows == {name: len(ids) for name, (ids, _) in delta.rows.items()}
    for name, tensor in after.items():
        assert torch.equal(before[name], tensor), name

    path = tmp_path / "00000001.rows.safetensors"
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    with pytest.raises(DeltaError, match=r"delta 1.*rows.safetensors"):
        verify_deltas(tmp_path)
    with path.open("wb") as file:
        file.truncate(1 << 42)  # no memory is taken for it
    with pytest.raises(DeltaError, match=r"delta 1.*rows.safetensors"):
        verify_deltas(tmp_path)
    path.write_bytes(sound)
    path = tmp_path / "00000002.json"
    sound = path.read_bytes()
    path.write_bytes(sound + b" ")  # the next delta would follow on another digest than this one's
    with pytest.raises(DeltaError, match="delta 2"):
        verify_deltas(tmp_path)
    path.write_bytes(sound)
    (tmp_path / "00000001.json").rename(tmp_path / "00000003.json")
    with pytest.raises(DeltaError, match=r"delta 3.*1"):
        delta_records(tmp_path)


def test_old_deltas_are_removed_before_one_that_is_kept(tmp_path):
    published(tmp_path)  # deltas 1 and 2 of run "r"
    (tmp_path / "notes.json").touch()
    model, optimizer = models.make("mix")
    models.train(model, optimizer, range(4))
    publisher = DeltaPublisher(model, tmp_path, run="r", step=4)
    models.train(model, optimizer, range(4, 5))
    publisher.publish(5)
    records = delta_records(tmp_path)
    files = {path.name for path in tmp_path.iterdir()}
    publisher.remove_before(0.0, records[-1].published)
    assert {path.name for path in tmp_path.iterdir()} == files
    publisher.remove_before(time.time() + 60, records[1].published)
    assert [record.number for record in delta_records(tmp_path)] == [2, 3]
    assert {path.name for path in tmp_path.iterdir()} == {name for name in files if "00000001" not in name}
