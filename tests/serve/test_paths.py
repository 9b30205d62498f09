"""Served equals trained: drawn models give drawn inputs the same scores on every path.

The paths are the trained model, ``meshrec predict`` or ``recommend``, the server, and the C++ predictor.
``MESHREC_PATHS=20`` draws 20 models of each kind with 10 inputs each, and compiles every fifth for the C++
predictor.
"""

import asyncio
import contextlib
import json
import os
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from meshrec.cli.predict import main as predict
from meshrec.cli.recommend import main as recommend
from meshrec.cli.train import main as train
from meshrec.data.encoding import RowOrigin
from meshrec.data.faults import Faults
from meshrec.data.interactions import HISTORY, SEEN, TIMES
from meshrec.data.samples import PermutedSamples, to_batch
from meshrec.export import Predictor
from meshrec.export.package import why_not_compiled
from meshrec.runs.export import export_run
from meshrec.runs.fitting import features_of
from meshrec.runs.recommending import load_recommender, log_source
from meshrec.runs.scoring import load_scorer
from meshrec.serve import Limits
from meshrec.serve.metrics import Metrics
from meshrec.serve.models import ServedModel
from meshrec.serve.reading import BodyReader
from meshrec.serve.samples import read_samples
from meshrec.serve.scoring import ScoringEndpoint, score_request_of
from meshrec.serve.service import ScoringService
from meshrec.train import RunFolder, join
from meshrec.train.evaluation import EVALUATION_BATCH
from tests.export.conftest import torchs_own_warnings
from tests.export.test_runtime import call, program, pytestmark  # noqa: F401
from tests.serve.drawn_models import CLICKS, HISTORIES, ONLY_UNSEEN, clicks_of, log_of
from tests.serve.test_drawn_columns import in_json

NUM_MODELS = int(os.environ.get("MESHREC_PATHS", "0"))
NUM_INPUTS = 10 if NUM_MODELS else 2
BOUND = {"rtol": 2e-5, "atol": 2e-6}
"""The trained model and ``meshrec predict`` score batches of 4096, servers what has come, and a package's
program is compiled: matrix libraries and compilers sum in another order for each size."""


@contextlib.contextmanager
def a_run(folder, kind, seed, data):
    """Train the model of a draw; give its run."""
    pq.write_table(data, folder / "train.parquet")
    with pytest.MonkeyPatch.context() as patch, torchs_own_warnings():
        patch.setenv("MESHREC_DRAWN", f"{kind}:{seed}:{folder}")
        options = ["--runs", str(folder), "--name", "r", "--quiet", "--device", "cpu"]
        assert train(["tests/serve/drawn_models.py:recipe", *options]) == 0
        yield RunFolder(folder / "r")


@contextlib.contextmanager
def trained(folder, kind, seed, data, *, compile):
    """Train and export the model of a draw; give its run and its predictor."""
    with a_run(folder, kind, seed, data) as run:
        yield run, Predictor(export_run(run, folder / "package", compile=compile))


def rows_for(rng, folder, number):
    """Draw new rows of clicks, and write them in another order with a further column."""
    new = clicks_of(rng, int(rng.integers(1, 40)), is_new=True).drop_columns(["y"])
    order, file = rng.permutation(new.column_names).tolist(), folder / f"{number}.parquet"
    pq.write_table(new.select(order).append_column("further", pa.nulls(new.num_rows)), file)
    return new, file


def by_trained(run, new, file):
    """Return the scores of the trained model, and its input: what training makes of the rows."""
    features = features_of(run).unlabelled()
    samples = features.encode(new, RowOrigin("new", 0), Faults("raise"))
    whole = PermutedSamples(samples)
    batch = to_batch(features.keys, features.shape, whole.ranges(0, whole.num))
    scorer = load_scorer(run, join("cpu"), file, labelled=False)
    scorer.model.eval()
    whole = batch.padded(EVALUATION_BATCH)
    with torch.no_grad():
        logits = scorer.model(whole.dense, whole.sparse)[: len(batch)]
    logits = logits.reshape(-1) if logits.shape[1:] in ((), (1,)) else logits
    return scorer.recipe.loss.scores(logits).numpy(), samples


def by_predict(folder, file):
    """Return the columns of scores that ``meshrec predict`` writes."""
    out = file.with_suffix(".scores.parquet")
    assert predict(["r", "--runs", str(folder), "--data", str(file), "--out", str(out)]) == 0
    scores = pq.read_table(out)
    return [scores[name].to_numpy() for name in scores.column_names if name.startswith("score")]


def answers(predictor, paths_and_bodies):
    """Return what the server answers, by its ASGI application."""
    served = ServedModel("m", predictor, Limits(), Metrics(), None)
    repository = SimpleNamespace(get_only=lambda: served, get=lambda *_: served)
    connections = SimpleNamespace(reserve=lambda _: None, release=lambda _: None)
    reader = BodyReader()
    scoring = ScoringEndpoint(ScoringService(repository, Metrics(), connections), 1 << 24, reader)

    async def ask(path, body):
        sent = []

        async def receive():
            return {"type": "http.request", "body": body}

        async def send(message):
            sent.append(message)

        name, _, query = path.partition("?")
        scope = {"method": "POST", "headers": [], "query_string": query.encode()}
        await scoring(score_request_of(name), scope, receive, send)
        said = json.loads(sent[-1]["body"])
        assert sent[0]["status"] == 200, said
        return said

    async def every():
        said = [await ask(*each) for each in paths_and_bodies]
        await served.batcher.drain()
        return said

    try:
        return asyncio.run(every())
    finally:
        reader.close()


def body_of(rng, columns):
    """JSON of columns: reordered, with further ones, and whole numbers in any form."""

    def written(value):
        if isinstance(value, list):
            return [written(each) for each in value]
        return float(value) if type(value) is int and rng.random() < 0.3 else value

    names = rng.permutation([*columns, "further"]).tolist()
    values = {name: [written(in_json(each)) for each in column] for name, column in columns.items()}
    values["further"] = [None] * len(next(iter(values.values())))
    return json.dumps(
        [dict(zip(names, row, strict=True)) for row in zip(*map(values.get, names), strict=True)]
    )


def assert_same_inputs(request, dense, ragged):
    np.testing.assert_array_equal(request.dense.view(np.int32), dense.view(np.int32))
    for values, lengths, each in zip(request.values, request.lengths, ragged, strict=True):
        np.testing.assert_array_equal(values, each.values[each.offsets[0] : each.offsets[-1]])
        np.testing.assert_array_equal(lengths, np.diff(each.offsets))


def by_cpp(program, folder, request):  # noqa: F811
    bags = [np.split(v, np.cumsum(n)[:-1]) for v, n in zip(request.values, request.lengths, strict=True)]
    rows = zip(request.dense.tolist(), *bags, strict=True)
    lines = [" | ".join(" ".join(map(str, part)) for part in row) + "\n" for row in rows]
    done = call(program, folder, input="".join(lines), check=True)
    return np.array([float(word) for word in done.stdout.split()], np.float32)


@pytest.mark.parametrize("seed", range(NUM_MODELS or 1))
def test_models_of_clicks(seed, tmp_path, request):
    if getattr(CLICKS[seed % len(CLICKS)], "fit_trees", 0):
        pytest.importorskip("lightgbm")
    rng = np.random.default_rng([seed, 2])
    # To compile takes half a minute. tests/export has packages of all kinds in C++.
    is_compiled = NUM_MODELS > 0 and seed % 5 == 0 and why_not_compiled() is None
    data = clicks_of(rng, 300, is_new=False)
    with trained(tmp_path, "clicks", seed, data, compile=is_compiled) as (run, predictor):
        assert predictor.is_compiled == is_compiled
        for number in range(NUM_INPUTS):
            new, file = rows_for(rng, tmp_path, number)
            by_model, samples = by_trained(run, new, file)
            (scores,) = by_predict(tmp_path, file)
            np.testing.assert_array_equal(scores, by_model)
            # The server
            raw = predictor.raw
            signature = ServedModel("m", predictor, Limits(), Metrics(), None).signature
            body = body_of(rng, {name: new[name].to_pylist() for name in raw.columns})
            asked = read_samples(body, signature)
            assert_same_inputs(asked, samples.dense, samples.ids)
            (said,) = answers(predictor, [("/predict", body)])
            by_server = np.array(said["scores"], np.float32)
            arrays = [torch.from_numpy(each) for each in (*asked.values, *asked.lengths)]
            half = len(asked.values)
            by_package = predictor.run(torch.from_numpy(asked.dense), arrays[:half], arrays[half:]).numpy()
            np.testing.assert_array_equal(by_server, by_package)
            np.testing.assert_allclose(by_server, by_model, **BOUND)
            if is_compiled:
                np.testing.assert_array_equal(
                    by_cpp(request.getfixturevalue("program"), tmp_path / "package", asked), by_server
                )


@pytest.mark.parametrize("kind", ["weighted", "tasks"])
@pytest.mark.parametrize("seed", range(-(-NUM_MODELS // 5) or 1))
def test_models_that_no_package_has(seed, kind, tmp_path):
    """Weights of IDs and several scores have no place in a request: ``meshrec predict`` alone scores them."""
    rng = np.random.default_rng([seed, 4])
    data = clicks_of(rng, 300, is_new=False)
    with a_run(tmp_path, kind, seed, data) as run:
        for number in range(NUM_INPUTS):
            new, file = rows_for(rng, tmp_path, number)
            by_model, _ = by_trained(run, new, file)
            scores = np.stack(by_predict(tmp_path, file), -1)
            np.testing.assert_array_equal(scores, by_model.reshape(len(scores), -1))
        with pytest.raises(ValueError, match={"weighted": "weight", "tasks": "'y', 'spent'"}[kind]):
            export_run(run, tmp_path / "package", compile=False)
        assert not (tmp_path / "package").exists()


@pytest.mark.parametrize("seed", range(NUM_MODELS or 1))
def test_models_of_histories(seed, tmp_path):
    rng = np.random.default_rng([seed, 3])
    data = log_of(rng, is_new=False)
    with trained(tmp_path, "histories", seed, data, compile=False) as (run, predictor):
        for number in range(NUM_INPUTS):
            log = log_of(rng, is_new=True)
            file, out = tmp_path / f"{number}.parquet", tmp_path / f"{number}-items.parquet"
            pq.write_table(log.append_column("further", pa.nulls(log.num_rows)), file)
            command = ["r", "--runs", str(tmp_path), "--data", str(file), "--out", str(out), "-k", "5"]
            assert recommend(command) == 0
            recommended = pq.read_table(out).to_pandas()
            users = log["user"].unique().to_pylist()
            lists = log.group_by("user", use_threads=False).aggregate([("item", "list"), ("time", "list")])
            columns = {HISTORY: lists["item_list"], TIMES: lists["time_list"], SEEN: pa.nulls(len(users))}
            columns["user"] = lists["user"]
            columns = {name: columns[name].to_pylist() for name in predictor.raw.columns}
            body = body_of(rng, columns)
            signature = ServedModel("m", predictor, Limits(), Metrics(), None).signature
            request = read_samples(body, signature)
            recommender = load_recommender(run, join("cpu"), data=file)
            (batch,) = recommender.reader.batches(100)
            for name, values, lengths in zip(
                predictor.features, request.values, request.lengths, strict=True
            ):
                of_model = batch.sparse[name]
                np.testing.assert_array_equal(lengths, of_model.lengths().numpy(), err_msg=name)
                if log_source(run).hashed is None or name == TIMES:  # a package has rows in place of keys
                    np.testing.assert_array_equal(values, of_model.values().numpy(), err_msg=name)
            (said,) = answers(predictor, [("/recommend?k=5", body)])
            for user, items, scores in zip(users, said["items"], said["scores"], strict=True):
                of_user = recommended[recommended.user == user]
                assert len(of_user) == (5 if user == ONLY_UNSEEN else len(items)), user
                np.testing.assert_allclose(scores, of_user.score, rtol=2e-5, atol=1e-5)
                if log_source(run).hashed is None:
                    assert items == of_user["item"].tolist()
                elif scores:  # a hashed run orders equal scores by key, and its package by row
                    bound = scores[-1] + 1e-4
                    above = {item for item, score in zip(items, scores, strict=True) if score > bound}
                    assert above == set(of_user[of_user.score > bound]["item"])


def test_every_architecture_is_drawn():
    assert len({type(each) for each in CLICKS}) == 6
    assert len({type(each) for each in HISTORIES}) == 5
