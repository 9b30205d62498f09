"""Files broken at their joints, spliced from two sound ones, or taken from another folder: second program."""

import contextlib
import json
import os
import random
import threading
import time
import zlib

import pytest
import torch

import meshrec
from meshrec.checkpoint import CheckpointError, load, read_manifest, save, verify_data
from meshrec.checkpoint.manifest import MANIFEST
from meshrec.durable import sealed, unsealed, write_digests
from meshrec.durable.sealed import SEAL
from meshrec.export import PackageError, Predictor, export
from meshrec.export.manifest import layout_of
from meshrec.export.predictor import read_manifest as manifest_of
from meshrec.models.dlrm import DLRM
from meshrec.runs import load_recipe
from meshrec.serve.fresh import apply_deltas
from meshrec.train import resolve
from meshrec.train.run_folder import CONFIG, RunFolder, to_json
from tests.export.conftest import torchs_own_warnings
from tests.hostile.damage import Tally, number
from tests.hostile.second.joints import broken, rewritten
from tests.hostile.test_deltas import Follower, is_unpublished
from tests.serve.toys import NUM_ROWS

SEED = int(os.environ.get("MESHREC_SEED", "0")) + 3100


@contextlib.contextmanager
def replaced(path, content):
    """The file with another content; the sound one comes back at the end."""
    sound = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(sound)


class Kept:
    """A checkpoint, and what was saved in it."""

    def __init__(self, folder, seed):
        torch.manual_seed(seed)
        self.folder, state = folder, self.fresh()
        for tensor in self.tensors(state):
            tensor.data.copy_(torch.rand(tensor.shape) * 100)
        save(folder, state, step=seed)
        self.saved = [tensor.detach().clone() for tensor in self.tensors(state)]

    @staticmethod
    def fresh():
        net = torch.nn.ModuleDict({name: torch.nn.Linear(20, 20) for name in ("a", "b")})
        return {"net": net, "more": {"x": torch.zeros(700), "y": [torch.zeros(700), torch.zeros(3, 3).int()]}}

    @staticmethod
    def tensors(state):
        return [*state["net"].state_dict().values(), state["more"]["x"], *state["more"]["y"]]

    def check(self, *, must_refuse):
        """Verify and load; every tensor must be the saved one, unless the load is refused."""
        verified = False
        try:
            manifest = read_manifest(self.folder)
            verify_data(self.folder, manifest)
            verified = True
        except CheckpointError:
            pass
        assert not (verified and must_refuse), "verify finds nothing"
        state = self.fresh()
        before = [tensor.clone() for tensor in self.tensors(state)]
        try:
            load(self.folder, state)
        except CheckpointError:
            assert all(map(torch.equal, self.tensors(state), before))
            return
        except ValueError as error:  # a sound checkpoint of another state
            assert verified, error  # noqa: PT017
            assert all(map(torch.equal, self.tensors(state), before))
            return
        assert verified, "verify refuses what load accepts"
        assert all(map(torch.equal, self.tensors(state), self.saved)), "other weights were loaded"


@pytest.fixture
def kept(tmp_path):
    return Kept(tmp_path / "one", 1), Kept(tmp_path / "other", 2)


def test_checkpoints(kept):
    one, other = kept
    tally, draw = Tally("second program: checkpoints"), random.Random(SEED)
    files = list(zip(sorted(one.folder.iterdir()), sorted(other.folder.iterdir()), strict=True))
    for _ in range(number(40)):
        path, its = draw.choice(files)
        what, content = broken(path.read_bytes(), its.read_bytes(), draw)
        with replaced(path, content):
            tally.attempt(f"{path.name}: {what}", lambda: one.check(must_refuse=True))
    one.check(must_refuse=False)
    tally.finish()


def test_manifests_of_checkpoints(kept):
    """Rewritten as text, with a right checksum."""
    one, _ = kept
    tally, draw = Tally("second program: manifests of checkpoints"), random.Random(SEED + 1)
    path = one.folder / MANIFEST
    text = path.read_bytes().split(b"\n")[0].decode()
    for _ in range(number(60)):
        what, changed = rewritten(text, draw)
        body = changed.encode("utf-8", "surrogatepass")
        with replaced(path, body + b'\n{"crc32": %d}\n' % zlib.crc32(body)):
            tally.attempt(what, lambda: one.check(must_refuse=False))
    tally.finish()


def package(folder, seed):
    torch.manual_seed(seed)
    tables = [
        meshrec.EmbeddingBagConfig(name=f"t_{f}", embedding_dim=4, num_embeddings=NUM_ROWS, feature_names=[f])
        for f in ("user", "item")
    ]
    model = DLRM(meshrec.EmbeddingBagCollection(tables), 3, [8, 4], [8, 1])
    about = {"run": "r", "step": seed}
    with torchs_own_warnings():
        return export(model, folder, features=["user", "item"], num_dense=3, about=about, compile=False)


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("second")
    return package(folder / "one", 1), package(folder / "other", 2)


@pytest.fixture
def programs(monkeypatch):
    """The programs that predictors load; to load them takes long, and nothing of a bad package may be."""
    loaded = []
    monkeypatch.setattr(Predictor, "_load", lambda *_: loaded.append("a program"))
    return loaded


def test_packages(packages, programs):
    one, other = packages
    tally, draw = Tally("second program: packages"), random.Random(SEED + 2)
    files = sorted(path for path in one.iterdir() if path.is_file())

    def check():
        programs.clear()
        with pytest.raises(PackageError):
            Predictor(one)
        assert programs == []

    for _ in range(number(40)):
        path = draw.choice(files)
        its = other / path.name
        what, content = broken(path.read_bytes(), its.read_bytes() if its.exists() else b"", draw)
        with replaced(path, content):
            tally.attempt(f"{path.name}: {what}", check)
    Predictor(one)
    tally.finish()


def test_manifests_of_packages(packages, programs):
    """Rewritten as text, with layout and digests made anew where they can be."""
    one, _ = packages
    tally, draw = Tally("second program: manifests of packages"), random.Random(SEED + 3)
    names = ("features", "num_dense", "outputs", "rows", "weights", "hashed")
    sound = {name: manifest_of(one).get(name) for name in names}
    weights = {name: weight.clone() for name, weight in Predictor(one).weights.items()}
    text = (one / "manifest.json").read_text()

    def check():
        try:
            found = Predictor(one)
        except PackageError:
            return
        assert {name: manifest_of(one).get(name) for name in names} == sound
        assert found.weights.keys() == weights.keys()
        assert all(torch.equal(found.weights[name], weight) for name, weight in weights.items())

    for _ in range(number(40)):
        what, changed = rewritten(text, draw)
        with contextlib.ExitStack() as stack:
            for name in ("layout.txt", "digests.txt"):
                stack.enter_context(replaced(one / name, (one / name).read_bytes()))
            stack.enter_context(replaced(one / "manifest.json", changed.encode("utf-8", "surrogatepass")))
            # What cannot be written as a layout is a wrong manifest already.
            with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):
                (one / "layout.txt").write_text(layout_of(json.loads(changed)))
            write_digests(one)
            tally.attempt(what, check)
    Predictor(one)
    tally.finish()


def followed(follower, mend, *, sealed_anew=False):
    """What is applied is a whole number of deltas; what is not has a reason, and mending lets it go on."""
    deltas = follower.begin()
    apply_deltas(deltas)
    reached = deltas.freshness.delta or 0
    assert follower.holds(reached), "half a delta was applied"
    if reached < 3 and not is_unpublished(follower.folder, reached + 1):
        assert deltas.freshness.reason
    mend()
    if sealed_anew:  # a record with another step or run may have been accepted; its weights are right
        deltas = follower.begin()
    apply_deltas(deltas)
    assert (deltas.freshness.delta, deltas.freshness.reason) == (3, "")
    assert follower.holds(3)


@pytest.fixture
def followers(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    one, other = Follower(tmp_path / "one"), Follower(tmp_path / "other")
    # The same run, trained again: every file of it is sound and none belongs to the first one.
    for at in (1, 2, 3):
        path = other.folder / f"{at:08d}.json"
        said = unsealed(path.read_bytes(), "it", required=True)
        path.write_bytes(sealed({**said, "step": said["step"] + 1}))
    return one, other


def test_deltas(followers):
    one, other = followers
    tally, draw = Tally("second program: deltas"), random.Random(SEED + 4)
    files = sorted(one.folder.iterdir())
    for _ in range(number(40)):
        path = draw.choice(files)
        sound = path.read_bytes()
        what, content = broken(sound, (other.folder / path.name).read_bytes(), draw)
        with replaced(path, content):
            tally.attempt(
                f"{path.name}: {what}",
                lambda path=path, sound=sound, what=what: followed(
                    one, lambda: path.write_bytes(sound), sealed_anew="other folder's" in what
                ),
            )
    tally.finish()


def test_records_of_deltas(followers):
    """Rewritten as text, with a right checksum where it is still JSON."""
    one, _ = followers
    tally, draw = Tally("second program: records of deltas"), random.Random(SEED + 5)
    for _ in range(number(40)):
        path = one.folder / f"{draw.choice([1, 2, 3]):08d}.json"
        sound = path.read_bytes()
        what, changed = rewritten(json.dumps(unsealed(sound, "it", required=True)), draw)
        content = changed.encode("utf-8", "surrogatepass")
        with contextlib.suppress(ValueError, TypeError):
            content = sealed(json.loads(changed))
        with replaced(path, content):
            tally.attempt(
                f"{path.name}: {what}",
                lambda path=path, sound=sound: followed(
                    one, lambda: path.write_bytes(sound), sealed_anew=True
                ),
            )
    tally.finish()


def test_deltas_that_are_replaced_while_they_are_read(followers):
    """A program that does not write as ours does: in parts, in any order, over files that are there."""
    one, _ = followers
    tally, draw = Tally("second program: deltas replaced half-way"), random.Random(SEED + 6)
    files = {path: path.read_bytes() for path in sorted(one.folder.iterdir())}

    def write(paths):
        for path in paths:
            content = files[path]
            half = draw.randrange(len(content))
            with path.open("wb") as file:
                file.write(content[:half])
                file.flush()
                time.sleep(draw.choice([0, 1e-4, 1e-3]))
                file.write(content[half:])

    def check():
        for path in files:
            path.unlink()
        order = draw.sample(list(files), len(files))
        writer = threading.Thread(target=write, args=(order + draw.sample(order, 3),))
        deltas = one.begin()
        writer.start()
        while writer.is_alive():
            found = deltas.next()
            if found is not None:
                with torch.no_grad():
                    for portion in deltas.portions(*found):
                        portion()
            assert one.holds(deltas.freshness.delta or 0)
        writer.join()
        apply_deltas(deltas)
        assert (deltas.freshness.delta, deltas.freshness.reason) == (3, "")
        assert one.holds(3)

    for attempt in range(number(20)):
        tally.attempt(f"attempt {attempt}", check)
    tally.finish()


@pytest.mark.parametrize("is_sealed", [True, False])
def test_configs_of_runs(tmp_path, is_sealed):
    tally = Tally(f"second program: configs of runs{'' if is_sealed else ', rewritten'}")
    draw, run = random.Random(SEED + 7), RunFolder(tmp_path)
    for recipe, folder in (("movielens_dlrm", run), ("dcn", RunFolder(tmp_path / "other"))):
        folder.path.mkdir(exist_ok=True)
        said = {"source": recipe, "code": None, "recipe": to_json(resolve(recipe)), "ranks": 2}
        folder.write_json(CONFIG, said, seal=True)
    path, sound = run.path / CONFIG, resolve("movielens_dlrm")
    content, other = path.read_bytes(), (tmp_path / "other" / CONFIG).read_bytes()
    plain = json.loads(content)
    del plain[SEAL]

    def check(is_other):
        try:
            found = load_recipe(run)
        except ValueError as error:
            assert 10 < len(str(error)) < 2000  # noqa: PT017
            return
        assert not is_sealed or is_other or found == sound

    for _ in range(number(40)):
        if is_sealed:
            what, changed = broken(content, other, draw)
        else:
            what, text = rewritten(json.dumps(plain), draw)
            changed = text.encode("utf-8", "surrogatepass")
        with replaced(path, changed):
            is_other = changed.strip() == other.strip()
            tally.attempt(what, lambda is_other=is_other: check(is_other))
    tally.finish()
