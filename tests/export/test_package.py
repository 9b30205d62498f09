import json
import os

import pytest
import torch
from torch import nn

import meshrec
from meshrec.export import PackageError, Predictor, export
from meshrec.train.losses import SquaredError
from tests.export.conftest import FEATURES, NUM_DENSE, torchs_own_warnings


def scores_of(model, dense, values, lengths):
    sparse = meshrec.KeyedJaggedTensor(
        FEATURES, torch.cat([values[f] for f in FEATURES]), None, torch.cat([lengths[f] for f in FEATURES])
    )
    with torch.no_grad():
        return torch.sigmoid(model(dense, sparse).reshape(-1))


@pytest.fixture(params=["package", "uncompiled"])
def predictor(request):
    with torchs_own_warnings():
        return Predictor(request.getfixturevalue(request.param), verify=True)


def test_one_package_serves_all_batch_sizes(predictor, model, requests):
    for batch in (0, 1, 2, 7, 2048):
        dense, values, lengths = requests(batch)
        torch.testing.assert_close(
            predictor(dense, values, lengths), scores_of(model, dense, values, lengths), rtol=1e-5, atol=1e-6
        )


def test_weights_are_in_one_file_only(package, model):
    tables = sum(parameter.nbytes for parameter in model.parameters())
    sizes = {path.name: path.stat().st_size for path in package.iterdir()}
    assert sizes["weights.bin"] >= tables
    manifest = json.loads((package / "manifest.json").read_text())
    assert {record["name"] for record in manifest["weights"]} == dict(model.named_parameters()).keys()
    data = (package / "weights.bin").read_bytes()
    weight = model.sparse_arch.embedding_bag_collection.embedding_bags["t1"].weight.detach()
    start = weight.numpy().tobytes()[:64]
    assert data.count(start) == 1
    for name in ("program.pt2", "exported.pt2"):
        assert start not in (package / name).read_bytes()
    assert manifest["about"] == {"step": 7}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d, v, n: (d[:, 1:], v, n), r"dense must be \[batch, 4\] float32, got \[5, 3\]"),
        (lambda d, v, n: (d.double(), v, n), r"dense must be .* float32, got \[5, 4\] torch.float64"),
        (
            lambda d, v, n: (d.index_fill(0, torch.tensor([3]), float("nan")), v, n),
            r"dense is NaN in sample 3",
        ),
        (lambda d, v, n: (d, {**v, "x": v["f0"]}, n), r"missing \[\], unknown \['x'\]"),
        (lambda d, v, n: (d, v, {"f0": n["f0"]}), r"missing \['f 1', 'f2'\]"),
        (lambda d, v, n: (d, {**v, "f0": v["f0"].int()}, n), r"'f0': ids must be a vector of int64"),
        (lambda d, v, n: (d, v, {**n, "f0": n["f0"][1:]}), r"'f0': 4 lengths for 5 samples"),
        (lambda d, v, n: (d, v, {**n, "f0": n["f0"] - 3}), r"'f0': a length is -\d"),
        (
            lambda d, v, n: (d, {**v, "f0": v["f0"][1:]}, n),
            r"'f0': the lengths sum to \d+, but there are \d+ ids",
        ),
        (
            lambda d, v, n: (d, {**v, "f 1": torch.cat([v["f 1"][:-1], torch.tensor([50])])}, n),
            r"table 't1': id 50 of feature 'f 1' \(sample \d\) is outside \[0, 50\)",
        ),
    ],
)
def test_bad_requests_are_named(predictor, requests, change, message):
    dense, values, lengths = requests(5)
    with pytest.raises(ValueError, match=message):
        predictor(*change(dense, values, lengths))


def copied(package, tmp_path):
    """With hard links: cheap, but files must be replaced, not written to."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in package.iterdir():
        os.link(path, folder / path.name)
    return folder


def replace(path, data):
    path.unlink()
    path.write_bytes(data)


def test_damage_is_named(package, tmp_path):
    with pytest.raises(PackageError, match="is no package"):
        Predictor(tmp_path)
    folder = copied(package, tmp_path)
    data = bytearray((folder / "weights.bin").read_bytes())
    data[100] ^= 1
    replace(folder / "weights.bin", data)
    with pytest.raises(PackageError, match=r"weights.bin is not what was written"):
        Predictor(folder, verify=True)
    replace(folder / "weights.bin", data[:4096])
    with pytest.raises(PackageError, match="is too short for"):
        Predictor(folder)
    (folder / "weights.bin").unlink()
    with pytest.raises(PackageError, match=r"weights.bin is missing"):
        Predictor(folder)
    replace(
        folder / "manifest.json",
        (folder / "manifest.json").read_bytes().replace(b'"format": 1', b'"format": 9'),
    )
    with pytest.raises(PackageError, match="is of format 9, this version reads 1"):
        Predictor(folder)


@pytest.mark.parametrize(
    ("name", "reason"), [("torch", "is for torch"), ("isa", "is for"), ("operators", "other versions")]
)
def test_a_program_for_something_else_is_not_run(package, tmp_path, caplog, requests, model, name, reason):
    folder = copied(package, tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest[name] = "other"
    replace(folder / "manifest.json", json.dumps(manifest).encode())
    with torchs_own_warnings():
        predictor = Predictor(folder)
    assert not predictor.is_compiled
    assert reason in caplog.text
    torch.testing.assert_close(predictor(*requests(3)), scores_of(model, *requests(3)), rtol=1e-5, atol=1e-6)


def test_what_cannot_be_exported_is_named_and_leaves_nothing(model, tmp_path, monkeypatch):
    class OnData(nn.Module):
        def forward(self, dense, sparse):
            return dense.sum(1) if dense.sum() > 0 else dense[:, 0]

    with torchs_own_warnings(), pytest.raises(ValueError, match="OnData cannot be exported: "):
        export(OnData(), tmp_path / "out", features=FEATURES, num_dense=NUM_DENSE)
    with torchs_own_warnings(), pytest.raises(ValueError, match=r"DLRM cannot be exported: .*f2"):
        export(model, tmp_path / "out", features=FEATURES[:2], num_dense=NUM_DENSE)
    with pytest.raises(ValueError, match=r"weight is torch.float64; a package holds float32"):
        export(nn.Linear(2, 2).double(), tmp_path / "out", features=FEATURES, num_dense=NUM_DENSE)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="is there already"):
        export(model, tmp_path, features=FEATURES, num_dense=NUM_DENSE)
    assert model.training


def test_without_a_compiler_python_serves(model, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with torchs_own_warnings():
        folder = export(model, tmp_path / "out", features=FEATURES, num_dense=NUM_DENSE)
    assert "no C++ compiler: 'no-such-compiler' was not found" in caplog.text
    assert not (folder / "program.pt2").exists()


def test_scores_are_what_the_loss_says(model, tmp_path, requests):
    request = requests(5)
    with torchs_own_warnings():
        plain = Predictor(
            export(
                model,
                tmp_path / "values",
                features=FEATURES,
                num_dense=NUM_DENSE,
                scores=SquaredError().scores,
                compile=False,
            )
        )
        clicks = Predictor(
            export(model, tmp_path / "clicks", features=FEATURES, num_dense=NUM_DENSE, compile=False)
        )
    torch.testing.assert_close(torch.sigmoid(plain(*request)), clicks(*request))


def test_several_outputs_are_refused(model, tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, dense, sparse):
            return self.model(dense, sparse).repeat(1, 2)

    with pytest.raises(ValueError, match=r"gives \(2,\) outputs for each sample, and a package gives one"):
        export(Two(), tmp_path / "out", features=FEATURES, num_dense=NUM_DENSE)
    assert not (tmp_path / "out").exists()
