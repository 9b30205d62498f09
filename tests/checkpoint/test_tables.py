import importlib.util
import logging
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from meshrec.checkpoint import blocks, export_safetensors, import_weights, load, save
from meshrec.checkpoint.agreement import DamagedCheckpointError
from meshrec.checkpoint.tables import read_weights

_spec = importlib.util.spec_from_file_location("checkpoint_models", Path(__file__).parent / "models.py")
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)


def saved(kind, folder):
    model, optimizer = models.make(kind)
    models.train(model, optimizer, range(2))
    save(folder / kind, models.state_of(model, optimizer))
    return models.whole(model.state_dict())


@pytest.mark.parametrize("kind", ["cw", "grid", "mix"])
def test_whole_tables_go_out_and_in(ranks, tmp_path, monkeypatch, kind):
    expected = ranks(4).run(saved, kind, tmp_path)[0]
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 50)
    names = export_safetensors(tmp_path / kind, tmp_path / "out.safetensors")
    assert set(names) == set(expected)
    found = read_weights(tmp_path / "out.safetensors")
    assert models.differences(found, expected) == []
    assert sorted(os.listdir(tmp_path)) == [kind, "out.safetensors"]


def import_into(folder, source):
    model, optimizer = models.make("cw")
    before = models.whole(model.state_dict())
    if models.default_env().world.rank == 0:
        rename = [(r"^(t\d)\.weight$", r"ebc.embedding_bags.\1.weight")]
        import_weights(source, folder / "imported", rename=rename)
    torch.distributed.barrier()
    load(folder / "imported", {"model": model}, partial=True)
    models.train(model, optimizer, range(0))
    return before, models.whole(model.state_dict())


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_pretrained_tables_of_embedding_bags(ranks, tmp_path, suffix):
    bags = nn.ModuleDict({name: nn.EmbeddingBag(*size) for name, size in models.SIZES.items()})
    del bags["t1"]
    source = tmp_path / f"source.{suffix}"
    if suffix == "pt":
        torch.save(bags.state_dict(), source)
    else:
        pytest.importorskip("safetensors.torch").save_file(bags.state_dict(), source)
    for before, after in ranks(2).run(import_into, tmp_path, source):
        for name in ("t0", "t2"):
            assert torch.equal(after[f"ebc.embedding_bags.{name}.weight"], bags[name].weight)
        assert (
            models.differences(
                {name: after[name] for name in ("over.weight", "ebc.embedding_bags.t1.weight")},
                {name: before[name] for name in ("over.weight", "ebc.embedding_bags.t1.weight")},
            )
            == []
        )


def test_what_is_left_is_told(tmp_path, caplog):
    save(tmp_path, {"model": nn.Linear(2, 3, bias=False)})
    with caplog.at_level(logging.INFO, "meshrec"):
        load(tmp_path, {"model": nn.Linear(2, 3)}, partial=True)
    assert "1 tensors are loaded; not in the checkpoint: 'model.bias'; not in the model: none" in caplog.text
    with pytest.raises(ValueError, match="'model'"):
        load(tmp_path, {"model": nn.Sequential(nn.Linear(2, 3))}, partial=True)


def test_numbers_alone(tmp_path):
    model = nn.BatchNorm1d(3)
    save(tmp_path / "a", {"model": model})
    export_safetensors(tmp_path / "a", tmp_path / "b.safetensors")
    assert read_weights(tmp_path / "b.safetensors")["num_batches_tracked"].shape == ()


def test_pickles_are_not_executed(tmp_path):
    class Bad:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    torch.save({"a": Bad()}, tmp_path / "bad.pt")
    with pytest.raises(ValueError, match=r"bad\.pt"):
        read_weights(tmp_path / "bad.pt")
    assert not (tmp_path / "executed").exists()


def write(path, content):
    path.write_bytes(content)
    return path


def test_other_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="header"):
        read_weights(write(tmp_path / "a.safetensors", b"\xff" * 20))
    with pytest.raises(ValueError, match="JSON"):
        read_weights(write(tmp_path / "a.safetensors", (4).to_bytes(8, "little") + b"no.."))
    bad = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    with pytest.raises(ValueError, match=r"'a'.*\[2\].*\[0.*8"):
        read_weights(write(tmp_path / "a.safetensors", len(bad).to_bytes(8, "little") + bad))
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(ValueError, match=r"list\.pt"):
        read_weights(tmp_path / "list.pt")


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path):
    save(tmp_path / "a", {"model": nn.Linear(2, 3), "other": nn.Linear(1, 1)})
    with pytest.raises(ValueError, match=r"\['model', 'other'\]"):
        export_safetensors(tmp_path / "a", tmp_path / "b")
    export_safetensors(tmp_path / "a", tmp_path / "b", entry="other")
    with pytest.raises(ValueError, match="exists"):
        export_safetensors(tmp_path / "a", tmp_path / "b", entry="other")
    with pytest.raises(ValueError, match="checkpoint"):
        import_weights(tmp_path / "b", tmp_path / "a")
    torch.save({"x.w": torch.ones(1), "y.w": torch.ones(1)}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match="'w'"):
        import_weights(tmp_path / "c.pt", tmp_path / "d", rename=[(r"^\w\.", "")])
    with pytest.raises(ValueError, match=r"'\('.*'x'"):
        import_weights(tmp_path / "c.pt", tmp_path / "d", rename=[("(", "x")])
    with pytest.raises(ValueError, match="reference 1"):
        import_weights(tmp_path / "c.pt", tmp_path / "d", rename=[("x", r"\1")])
    data = next((tmp_path / "a").glob("data-*"))
    content = bytearray(data.read_bytes())
    content[0] ^= 1
    data.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="header"):
        export_safetensors(tmp_path / "a", tmp_path / "e", entry="other")
    assert not any("e" in path.name.split(".") for path in tmp_path.iterdir())
