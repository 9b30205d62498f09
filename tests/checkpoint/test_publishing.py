import importlib.util
from pathlib import Path

import pytest
import torch

from meshrec.checkpoint import DeltaError, DeltaPublisher, verify_deltas
from meshrec.checkpoint.publishing import delta_records, read_delta

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


def test_deltas_bring_weights_up_to_date_and_are_verified(ranks, tmp_path):
    before, after = ranks(2).run(published, tmp_path)[0]
    records = verify_deltas(tmp_path)
    assert [(each.number, each.since, each.step) for each in records] == [(1, 1, 3), (2, 3, 4)]
    for record in records:
        delta = read_delta(tmp_path, record)
        for name, (ids, rows) in delta.rows.items():
            before[name][ids] = rows
        for name, tensor in delta.whole.items():
            before[name] = tensor.clone()
        assert record.rows == {name: len(ids) for name, (ids, _) in delta.rows.items()}
    for name, tensor in after.items():
        assert torch.equal(before[name], tensor), name

    path = tmp_path / "00000001.rows.safetensors"
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    with pytest.raises(DeltaError, match=r"delta 1: .*rows.safetensors is not what was written"):
        verify_deltas(tmp_path)
    path.write_bytes(sound)
    (tmp_path / "00000001.json").rename(tmp_path / "00000003.json")
    with pytest.raises(DeltaError, match=r"delta 3: .* cannot be read \(it is of another format or number\)"):
        delta_records(tmp_path)
