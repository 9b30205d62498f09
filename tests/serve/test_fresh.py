"""Deltas of a run, put into models that answer."""

import hashlib
import json
import os
import re
import threading
import time

import numpy as np
import pytest
import torch

from meshrec.checkpoint.delta import write_tensors
from meshrec.cli.train import main as train
from meshrec.durable import sealed
from meshrec.export import Predictor
from meshrec.modules import DataType
from meshrec.runs.export import export_run
from meshrec.runs.quantize import quantize_run
from meshrec.serve import fresh
from meshrec.serve.fresh import Deltas, Freshness, Quantization, apply_deltas
from meshrec.train import join
from meshrec.train.run_folder import find_run
from tests.export.conftest import torchs_own_warnings
from tests.serve.conftest import Client, running, samples, scores_of
from tests.serve.toys import NUM_ROWS, Toy
from tests.train.movies import write_movies


def publish(
    folder,
    number,
    *,
    since=None,
    step=None,
    previous=None,
    run="r",
    ids=None,
    table="table",
    values=None,
    event_time=None,
):
    """A delta by hand: rows of ``number / 10``, and the bias as well; or rows and whole tensors as given."""
    ids = torch.arange(NUM_ROWS) if ids is None else torch.tensor(ids)
    drawn = torch.full((len(ids), 64), number / 10), {"bias": torch.full((1,), number / 10)}
    rows, dense = values or drawn
    parts = {"rows": {f"{table}.ids": ids, f"{table}.rows": rows}, "dense": dense}
    digests = {}
    for kind, tensors in parts.items():
        path = folder / f"{number:08d}.{kind}.safetensors"
        write_tensors(path, tensors)
        digests[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    if previous is None:
        before = folder / f"{number - 1:08d}.json"
        previous = hashlib.sha256(before.read_bytes()).hexdigest() if before.exists() else ""
    said = {
        "format": 1,
        "number": number,
        "run": run,
        "since": 10 * (number - 1) if since is None else since,
        "step": 10 * number if step is None else step,
        "rows": {table: len(ids)},
        "sha256": digests,
        "previous": previous,
    }
    scratch = folder / ".scratch"
    scratch.write_text(json.dumps(said))
    if event_time is not None:
        latest = {"format": 3, "event_time": event_time, "tracked": [table], "whole": ["bias"]}
        scratch.write_bytes(sealed(said | latest))
    scratch.replace(folder / f"{number:08d}.json")


@pytest.fixture
def toy(packages):
    return Toy(packages[0])  # of step 10


def deltas_of(toy, folder, **options):
    return Deltas(folder, toy.about, toy.weights, **options)


def test_deltas_after_the_package_are_put_in_place_in_order(toy, tmp_path):
    publish(tmp_path, 1)  # the package holds these steps
    publish(tmp_path, 2, since=5, ids=[1, 2])
    publish(tmp_path, 3, ids=[2, 3])
    deltas = deltas_of(toy, tmp_path)
    apply_deltas(deltas)
    assert deltas.freshness == Freshness(3, 30, "")
    found = toy.weights["table"]
    assert torch.allclose(found[:5, 0], torch.tensor([0, 0.2, 0.3, 0.3, 0]))
    assert torch.equal(found, found[:, :1].expand_as(found))
    assert torch.allclose(toy.weights["bias"], torch.tensor(0.3))
    until = deltas_of(blank(toy), tmp_path, until=2)
    apply_deltas(until)
    assert until.freshness.delta == 2


def blank(toy):
    other = object.__new__(Toy)
    other.about = toy.about
    other.weights = {name: torch.zeros_like(weight) for name, weight in toy.weights.items()}
    return other


def drop(folder, number):
    (folder / f"{number:08d}.json").unlink()


def damage(folder, name):
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1
    (folder / name).write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda f: drop(f, 3), "delta 3 is missing: 4 comes after 2"),
        (lambda f: damage(f, "00000003.rows.safetensors"), "delta 3: .*rows.safetensors does not match"),
        (lambda f: damage(f, "00000003.dense.safetensors"), "delta 3: .*dense.safetensors does not match"),
        (lambda f: (f / "00000003.json").write_text("{"), "delta 3: .* cannot be read"),
        (lambda f: publish(f, 3, previous="0" * 64), "delta 3 does not follow delta 2"),
        (lambda f: publish(f, 3, run="other"), "delta 3 belongs to run 'other', the package to 'r'"),
        (lambda f: publish(f, 3, table="x"), "delta 3: 'x' does not fit the package"),
        (lambda f: publish(f, 3, ids=[0, NUM_ROWS]), "delta 3: rows of 'table' lie outside"),
    ],
)
def test_harm_is_named_and_the_last_good_state_stays(toy, tmp_path, caplog, harm, reason):
    publish(tmp_path, 2)
    deltas = deltas_of(toy, tmp_path)
    apply_deltas(deltas)
    for number in (3, 4):
        publish(tmp_path, number)
    harm(tmp_path)
    for _ in range(2):
        apply_deltas(deltas)
    assert deltas.freshness[:2] == (2, 20)
    assert re.search(reason, deltas.freshness.reason)
    assert len(caplog.records) == 1
    assert (toy.weights["table"] == 0.2).all()
    for number in (3, 4):
        publish(tmp_path, number)
    apply_deltas(deltas)
    assert deltas.freshness == Freshness(4, 40, "")


def test_a_package_that_is_too_old_is_told(toy, tmp_path):
    publish(tmp_path, 7)
    deltas = deltas_of(toy, tmp_path)
    apply_deltas(deltas)
    assert (
        "from step 10, but delta 7 only has changes after 60. Export the run again" in deltas.freshness.reason
    )


@pytest.mark.parametrize("published", [(2, "x"), (9, "x")])
def test_deltas_of_another_training_are_told(toy, tmp_path, published):
    for number in (1, 2, 3):
        publish(tmp_path, number)
    toy.about["published"] = published
    deltas = deltas_of(toy, tmp_path)
    apply_deltas(deltas)
    assert deltas.freshness.delta is None
    assert f"delta {published[0]}," in deltas.freshness.reason


def test_a_folder_is_looked_at_when_it_has_changed(toy, tmp_path, monkeypatch):
    looks = []
    listed = fresh.delta_numbers
    monkeypatch.setattr(fresh, "delta_numbers", lambda folder: looks.append(folder) or listed(folder))
    publish(tmp_path, 2)
    deltas = deltas_of(toy, tmp_path)
    apply_deltas(deltas)
    assert len(looks) == 1  # after delta 2, within its second
    apply_deltas(deltas)
    os.utime(tmp_path, (0, 0))
    for _ in range(3):
        apply_deltas(deltas)
    assert len(looks) == 3
    publish(tmp_path, 3)
    apply_deltas(deltas)
    assert deltas.freshness == Freshness(3, 30, "")


def until(condition):
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited for a minute")


def test_a_server_follows_goes_back_and_goes_on(packages, tmp_path):
    publish(tmp_path, 2)
    given = samples(8)
    ended, wrong = threading.Event(), []

    def ask():
        client = Client(server.url)
        while not ended.is_set():
            status, _, said = client("POST", "/predict", given)
            if status != 200:
                wrong.append(said)
        client.close()

    with running({"clicks": packages[0]}, deltas={"clicks": tmp_path}) as server:
        client = Client(server.url)
        thread = threading.Thread(target=ask)
        thread.start()

        def freshness():
            return client("GET", "/v2/models/clicks/freshness")[2]

        assert freshness() == {"delta": 2, "step": 20, "reason": "", "event_time": None}
        for number in (3, 4):
            publish(tmp_path, number)
            until(lambda number=number: freshness()["delta"] == number)
        expected = Toy(packages[0])
        expected.weights["table"].fill_(0.4)
        expected.weights["bias"].fill_(0.4)
        said = client("POST", "/predict", given)[2]
        assert said["version"] == "v1+4"
        np.testing.assert_allclose(said["scores"], scores_of(expected, given), rtol=1e-6)

        assert client("POST", "/v2/repository/models/clicks/rollback/3")[0] == 200
        publish(tmp_path, 5)
        assert client("POST", "/predict", given)[2]["version"] == "v1+3"
        status, _, said = client("POST", "/v2/repository/models/clicks/rollback/9")
        assert status == 400
        assert "delta 9 cannot be reached; the last reachable delta is 5" in said["error"]
        said = client("POST", "/v2/repository/models/clicks/rollback/1")[2]
        assert "the package already has step 10" in said["error"]
        assert freshness()["delta"] == 3
        assert client("GET", "/v2/health/ready")[2] == {"ready": True}  # the failures were the requests' own
        assert client("POST", "/v2/repository/models/clicks/load")[0] == 200
        assert freshness()["delta"] == 5
        damage(tmp_path, "00000005.rows.safetensors")
        publish(tmp_path, 6, previous="0" * 64)
        until(lambda: "delta 6 does not follow delta 5" in freshness()["reason"])
        assert client("POST", "/predict", given)[2]["version"] == "v1+5"
        ended.set()
        thread.join(60)
        client.close()
    assert wrong == []


def test_a_server_says_how_old_the_latest_event_in_its_weights_is(packages, tmp_path):
    seconds = time.time() - 45.5
    with running({"clicks": packages[0]}, deltas={"clicks": tmp_path}) as server:
        client = Client(server.url)
        publish(tmp_path, 2, event_time=int(seconds * 1e6))
        until(lambda: client("GET", "/v2/models/clicks/freshness")[2]["delta"] == 2)
        assert client("GET", "/v2/models/clicks/freshness")[2]["event_time"] == pytest.approx(
            seconds, abs=1e-5
        )
        text = client("GET", "/metrics")[2].decode()
        client.close()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if 'model="clicks"' in line)
    assert float(values['meshrec_event_time_seconds{model="clicks"}']) == pytest.approx(seconds, abs=1e-5)
    assert float(values['meshrec_event_to_served_seconds_count{model="clicks"}']) == 1
    assert 45 < float(values['meshrec_event_to_served_seconds_sum{model="clicks"}']) < 300


def test_deltas_of_another_run_are_refused_whatever_their_steps(toy, tmp_path):
    publish(tmp_path, 1, run="other", step=3, since=0)
    deltas = deltas_of(toy, tmp_path)
    apply_deltas(deltas)
    assert deltas.freshness.delta is None
    assert "belongs to run 'other'" in deltas.freshness.reason


def test_without_deltas_there_is_no_way_back(packages):
    with running({"clicks": packages[0]}) as server:
        client = Client(server.url)
        said = client("POST", "/v2/repository/models/clicks/rollback/1")[2]
        assert "--deltas" in said["error"]
        assert client("GET", "/v2/health/ready")[2] == {"ready": True}
        assert client("POST", "/v2/repository/models/clicks/unload")[0] == 200
        assert client("POST", "/v2/repository/models/clicks/rollback/1")[0] == 400
        assert client("POST", "/v2/repository/index")[2][0]["reason"] == "unloaded"
        client.close()


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A run of 10 steps that published deltas."""
    folder = tmp_path_factory.mktemp("published")
    options = [
        "--training.publish-every",
        "3",
        "--training.checkpoint-every",
        "4",
        "--training.keep-checkpoints",
        "9",
    ]
    assert (
        train(["tests/train/small.py:small", "--runs", str(folder), "--name", "r", "--quiet", *options]) == 0
    )
    return find_run("r", folder)


def test_after_the_last_delta_tables_are_those_of_a_fresh_export(published, tmp_path):
    run = published
    with torchs_own_warnings():
        old = Predictor(export_run(run, tmp_path / "old", step=4, compile=False))
        new = Predictor(export_run(run, tmp_path / "new", last=True, compile=False))
    deltas = Deltas(run.path / "deltas", old.about, old.weights)
    assert any(not torch.equal(old.weights[name], weight) for name, weight in new.weights.items())
    apply_deltas(deltas)
    assert deltas.freshness == Freshness(6, 10, "")  # of steps 3, 4, 6, 8, 9, 10
    assert old.weights.keys() == new.weights.keys()
    for name, weight in new.weights.items():
        assert torch.equal(old.weights[name], weight), name
    assert not torch.equal(Predictor(tmp_path / "old").weights[name], weight)  # the package is as it was


def test_deltas_are_quantised_like_the_package(published, tmp_path):
    """By a run whose deltas are of numbers: what `meshrec quantize` and an export would give at the end."""
    ranks, packages = join("cpu"), []
    for name, choice in (("old", {"step": 4}), ("new", {"last": True})):
        quantize_run(published, ranks, tmp_path / f"q-{name}", weights=DataType.INT4, **choice)
        with torchs_own_warnings():
            folder = export_run(published, tmp_path / name, quantised=tmp_path / f"q-{name}", compile=False)
            packages.append(Predictor(folder))
    old, new = packages
    codes = Quantization(old.quantised, old.rounding)
    deltas = Deltas(published.path / "deltas", old.about, old.weights, codes=codes)
    apply_deltas(deltas)
    assert deltas.freshness == Freshness(6, 10, "")
    assert len(old.quantised) == 3
    for name, weight in new.weights.items():
        assert torch.equal(old.weights[name], weight), name
    codes = codes._replace(rounding=None)
    unknown = Deltas(published.path / "deltas", old.about, old.weights, codes=codes)
    apply_deltas(unknown)
    assert re.search(r"the package does not record the rounding of '.*'", unknown.freshness.reason)


def trained_on_movies(recipe, folder, *options):
    """A run of next items with checkpoints and deltas, and its name."""
    folder = write_movies(folder / "ml")
    sizes = ["--model.embedding-dim", "8", "--training.batch-size", "16", "--training.max-steps", "12"]
    sizes += ["--training.evaluate-every", "None", "--training.patience", "None"]
    every = ["--training.publish-every", "3", "--training.checkpoint-every", "4"]
    every += ["--training.keep-checkpoints", "9"]
    arguments = [recipe, "--data.path", str(folder), "--runs", str(folder.parent), "--name", "r", "--quiet"]
    assert train([*arguments, *sizes, *every, *options]) == 0
    return find_run("r", folder.parent)


def followed(run, folder, **options):
    """A package of an early step with the deltas of the run, and a package of the last step."""
    with torchs_own_warnings():
        early, late = (
            Predictor(export_run(run, folder / str(step), step=step, compile=False, **options))
            for step in (4, 12)
        )
    codes = Quantization(early.quantised, early.rounding)
    deltas = Deltas(run.path / "deltas", early.about, early.weights, codes=codes)
    apply_deltas(deltas)
    return early, late, deltas.freshness


@pytest.mark.parametrize("recipe", ["sasrec", "gru4rec"] if "MESHREC_THOROUGH" in os.environ else ["sasrec"])
def test_deltas_of_next_items_reach_a_package_of_the_encoder(recipe, tmp_path):
    early, late, freshness = followed(trained_on_movies(recipe, tmp_path), tmp_path)
    assert (freshness.step, freshness.reason) == (12, "")
    assert early.weights.keys() == late.weights.keys()
    assert all(torch.equal(weight, late.weights[name]) for name, weight in early.weights.items())


def test_deltas_reach_a_tower_but_no_vectors_computed_for_a_package(tmp_path):
    run = trained_on_movies("two_tower", tmp_path)
    for tower in ("query", "item"):
        early, late, freshness = followed(run, tmp_path / tower, tower=tower)
        assert (freshness.step, freshness.reason) == (12, "")
        assert all(torch.equal(weight, late.weights[name]) for name, weight in early.weights.items())
    _, _, freshness = followed(run, tmp_path / "whole")
    assert freshness.delta is None
    assert "'item_vectors' was computed for the package" in freshness.reason


@pytest.mark.parametrize(
    "wrong", [{"trained_names": ["a"]}, {"trained_names": {"a": 1}}, {"trained_names": {}, "left_out": 3}]
)
def test_damaged_names_of_trained_weights_are_refused(toy, tmp_path, wrong):
    with pytest.raises(ValueError, match="trained weights"):
        Deltas(tmp_path, {**toy.about, **wrong}, toy.weights)
