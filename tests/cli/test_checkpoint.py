import json

import pytest
import torch
from torch import nn

from meshrec.checkpoint import CheckpointManager, load
from meshrec.cli.checkpoint import main


@pytest.fixture
def folder(tmp_path):
    checkpoints = CheckpointManager(tmp_path / "checkpoints")
    for step in (1, 2):
        checkpoints.save(step, {"model": nn.Linear(3, 2), "epoch": step})
    return tmp_path / "checkpoints"


def test_inspect(folder, capsys):
    assert main(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "step 2" in text
    assert "model.weight" in text
    assert "2 x 3" in text
    assert main(["inspect", str(folder.parent)]) == 0  # a run's folder
    assert capsys.readouterr().out == text
    main(["inspect", str(folder / "step-0000000001"), "--json"])
    summary = json.loads(capsys.readouterr().out)
    assert summary["step"] == 1
    assert summary["entries"] == {"model": "module", "epoch": "plain"}
    assert summary["tensors"]["model.bias"] == {"dtype": "F32", "shape": [2], "bytes": 8, "pieces": 1}


def test_verify(folder, capsys):
    assert main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out.count("sound") == 2
    data = next((folder / "step-0000000002").glob("data-*"))
    data.write_bytes(data.read_bytes()[:-1] + b"\xff")
    assert main(["verify", str(folder)]) == 1
    text = capsys.readouterr().out.replace("\n", "")
    assert text.count("sound") == 1
    assert "are not what was written" in text


def test_export_and_import(folder, tmp_path, capsys):
    out, back = tmp_path / "out.safetensors", tmp_path / "back"
    assert main(["export", str(folder), str(out), "--to", "safetensors"]) == 0
    assert main(["import", str(out), str(back), "--entry", "net"]) == 0
    assert "2 tensors in" in capsys.readouterr().out
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    load(folder / "step-0000000002", {"model": first})
    load(back, {"net": second})
    assert torch.equal(first.weight, second.weight)


def test_mistakes_are_named(folder, tmp_path):
    with pytest.raises(ValueError, match="checkpoint"):
        main(["inspect", str(tmp_path / "nowhere")])
    with pytest.raises(ValueError, match="folder"):
        main(["export", str(folder), str(tmp_path / "nowhere" / "x")])
    with pytest.raises(ValueError, match="--to"):
        main(["export", str(folder), str(tmp_path / "x"), "--to", "onnx"])
    for manifest in folder.glob("*/manifest.json"):
        manifest.unlink()
    with pytest.raises(ValueError, match="checkpoint"):
        main(["inspect", str(folder)])
