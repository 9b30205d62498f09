"""Damaged and crafted packages: each is refused with words that say what to do, before any of it is used."""

import contextlib
import hashlib
import json
import random

import pytest
import torch

import meshrec
from meshrec.durable import write_digests
from meshrec.export import PackageError, Predictor, export
from meshrec.export import predictor as predictor_module
from meshrec.export.manifest import layout_of
from meshrec.export.weights import Weights
from meshrec.models.dlrm import DLRM
from meshrec.optim import SGD
from tests.export.conftest import torchs_own_warnings
from tests.hostile.damage import Tally, crafted, harm, number

FEATURES = ["user", "item", "raw"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    tables = [
        meshrec.EmbeddingBagConfig(name=f"t_{f}", embedding_dim=4, num_embeddings=50, feature_names=[f])
        for f in FEATURES[:2]
    ]
    keys = meshrec.Hashed(max_rows=50)
    tables.append(
        meshrec.EmbeddingBagConfig(name="hashed", embedding_dim=4, feature_names=FEATURES[2:], keys=keys)
    )
    bags = meshrec.EmbeddingBagCollection(tables)
    meshrec.fuse(bags, optimizer=SGD(lr=0.1))
    ids = torch.arange(60)
    lengths = torch.tensor([0, 0, 0, 0, 30, 30])
    bags(meshrec.KeyedJaggedTensor(FEATURES, ids.clamp(max=29), lengths=lengths)).values().sum().backward()
    model = DLRM(bags, 3, [8, 4], [8, 1])
    with torchs_own_warnings():
        return export(
            model,
            tmp_path_factory.mktemp("packages") / "clicks",
            features=FEATURES,
            num_dense=3,
            about={"run": "r", "step": 1},
            compile=False,
        )


@pytest.fixture
def opened(exported, monkeypatch):
    """``opened(is_good)`` opens the package. Nothing of a bad one may be mapped or executed."""
    used = []
    monkeypatch.setattr(Predictor, "_load", lambda *_: used.append("a program"))
    monkeypatch.setattr(
        predictor_module, "Weights", lambda *given, **how: used.append("weights") or Weights(*given, **how)
    )
    version = Predictor(exported).version

    def check(is_good):
        used.clear()
        if is_good:
            assert Predictor(exported).version == version
            return
        with pytest.raises(PackageError) as caught:
            Predictor(exported)
        assert used == []
        assert "again" in str(caught.value) or "Export a model" in str(caught.value)

    return check


@pytest.mark.parametrize("has_digests", [True, False])
def test_damaged_files_of_packages(exported, opened, has_digests):
    kind = "damaged packages" if has_digests else "damaged packages without digests.txt"
    tally, draw = Tally(kind), random.Random(31)
    digests = (exported / "digests.txt").read_bytes()
    if not has_digests:
        (exported / "digests.txt").unlink()
    # Only digests.txt covers the manifest; what an old one says of its run can change unseen.
    files = sorted(path for path in exported.iterdir() if has_digests or path.name != "manifest.json")
    contents = {path: path.read_bytes() for path in files}

    def check(path):
        is_file = path.is_file() and not path.is_symlink() and path.stat().st_size == len(contents[path])
        is_same = is_file and path.read_bytes() == contents[path]
        is_gone = path.name == "digests.txt" and not path.exists() and not path.is_symlink()
        opened(is_same or is_gone)

    for _ in range(number(60)):
        path = draw.choice(files)
        what, mend = harm(path, draw)
        tally.attempt(what, lambda path=path: check(path))
        mend()
    opened(True)
    (exported / "digests.txt").write_bytes(digests)
    tally.finish()


def test_crafted_manifests(exported, opened):
    """Without digests.txt: it is a `PackageError`, or the package opens as its layout says."""
    tally, draw = Tally("crafted manifests of packages"), random.Random(32)
    path, digests = exported / "manifest.json", (exported / "digests.txt").read_bytes()
    content, layout = path.read_bytes(), (exported / "layout.txt").read_text()
    (exported / "digests.txt").unlink()

    def check():
        try:
            found = Predictor(exported)
        except PackageError:
            return
        assert predictor_module.read_manifest(exported)["format"] == 2
        assert [f"feature {f}" for f in found.features] == [
            line for line in layout.splitlines() if line.startswith("feature ")
        ]
        assert f"dense {found.num_dense}" in layout.splitlines()
        for name, weight in found.weights.items():
            assert any(line.endswith(f" {name}") for line in layout.splitlines())
            assert weight.is_contiguous()

    for _ in range(number(100)):
        what, said = crafted(json.loads(content), draw)
        path.write_text(json.dumps(said))
        tally.attempt(what, check)
    path.write_bytes(content)
    (exported / "digests.txt").write_bytes(digests)
    opened(True)
    tally.finish()


def test_crafted_manifests_with_right_digests(exported, opened):
    """Layout and digests are made anew for each: only the programs tell what they must be called with."""
    tally, draw = Tally("crafted manifests of packages, digests made anew"), random.Random(33)
    changed = [exported / name for name in ("manifest.json", "layout.txt", "digests.txt")]
    contents = {path: path.read_bytes() for path in changed}
    manifest = json.loads(contents[exported / "manifest.json"])
    sound = {
        name: manifest[name] for name in ("features", "num_dense", "outputs", "rows", "weights", "hashed")
    }
    types = [(name, weight.dtype, weight.shape) for name, weight in Predictor(exported).weights.items()]

    def check():
        try:
            found = Predictor(exported)
        except PackageError:
            return
        assert types == [(name, weight.dtype, weight.shape) for name, weight in found.weights.items()]
        assert {name: predictor_module.read_manifest(exported)[name] for name in sound} == sound

    for _ in range(number(60)):
        what, said = crafted(manifest, draw)
        # What cannot be written as a layout is a wrong manifest already.
        with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):
            (exported / "layout.txt").write_text(layout_of(said))
            digest = hashlib.sha256((exported / "layout.txt").read_bytes()).hexdigest()
            said["sha256"] = {**said["sha256"], "layout.txt": digest}
        (exported / "manifest.json").write_text(json.dumps(said))
        write_digests(exported)
        tally.attempt(what, check)
        for path, content in contents.items():
            path.write_bytes(content)
    opened(True)
    tally.finish()
