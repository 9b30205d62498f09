"""A server that keeps histories between requests, against one that encodes each history again."""

import os
import random
import re

import pyarrow as pa
import pytest
import torch

from meshrec import EmbeddingCollection, EmbeddingConfig
from meshrec.export import PackageError, Predictor, check_package, export
from meshrec.export.incremental import EncoderSpec, IncrementalQueries
from meshrec.export.next_items import NextItemQuery, RankedItems
from meshrec.models import HSTU, GRU4Rec, HistoryFeatures, SampledSoftmax
from tests.export.conftest import torchs_own_warnings
from tests.serve.conftest import Client, running
from tests.serve.test_fresh import publish
from tests.serve.test_workers import program, until
from tests.serve.toys import open_with

NUM_ITEMS, WIDTH, LONGEST = 200, 16, 40
FEATURES = ["history", "times", "seen"]
ROWS = 4 * 2 * WIDTH * LONGEST * 2
"""Bytes of the keys and values of the longest history in two layers."""
SERVE = "meshrec.cli.__main__:main"


def make_package(folder, kind, *, about=None, **options):
    torch.manual_seed(0)
    table = EmbeddingConfig(
        name="items", num_embeddings=NUM_ITEMS, embedding_dim=WIDTH, feature_names=["history", "next"]
    )
    times = "times" if kind is HSTU else None
    names = HistoryFeatures("history", "next", "seen", times)
    softmax = SampledSoftmax(similarity="cosine", temperature=0.05)
    model = kind(EmbeddingCollection([table]), names, max_length=LONGEST, softmax=softmax, **options).eval()
    for name, weight in model.named_parameters():
        if "bias" in name or "positions" in name:
            torch.nn.init.normal_(weight)
    query = NextItemQuery(model)
    ids = torch.arange(1, NUM_ITEMS).numpy()
    items = RankedItems.of(query, ids, pa.array(ids))
    with torchs_own_warnings():
        return export(
            query,
            folder,
            features=FEATURES,
            num_dense=0,
            scores=None,
            items=items,
            about=about or {},
            compile=False,
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages")
    make_package(folder / "hstu", HSTU, num_heads=2, about={"run": "r", "step": 10})
    make_package(folder / "gru", GRU4Rec)
    return folder


def draw_history(chosen, num):
    return [chosen.randrange(1, NUM_ITEMS) for _ in range(num)], sorted(
        chosen.randrange(10**6) for _ in range(num)
    )


def rounds(chosen):
    """Requests of several users whose histories grow, stay, are edited in the middle, and begin again."""
    users = [draw_history(chosen, chosen.randrange(LONGEST // 2)) for _ in range(5)]
    for _ in range(12 if "MESHREC_THOROUGH" in os.environ else 6):
        for place in chosen.sample(range(5), 3):
            items, times = map(list, users[place])
            event = chosen.random()
            if event < 0.6 and len(items) < LONGEST - 3:
                num = chosen.randrange(1, 4)
                items += draw_history(chosen, num)[0]
                times += [(times or [0])[-1] + 100 * each for each in range(1, num + 1)]
            elif event < 0.8 and items:
                items[len(items) // 2] = chosen.randrange(1, NUM_ITEMS)
            elif event < 0.9 and items:
                times[0] -= 1
            elif event > 0.95:
                items, times = draw_history(chosen, 3)
            users[place] = items, times
        asked = [users[place] for place in chosen.sample(range(5), chosen.randrange(1, 4))]
        yield [{"history": items, "times": times, "seen": []} for items, times in asked]


def vectors_of(predictor, asked):
    """Return the vectors of whole histories."""
    values = {name: [each[name] for each in asked] for name in FEATURES}
    return predictor(
        torch.zeros(len(asked), 0),
        {n: torch.tensor([x for each in v for x in each], dtype=torch.int64) for n, v in values.items()},
        {n: torch.tensor([len(each) for each in v]) for n, v in values.items()},
    )


def figures(client):
    text = client("GET", "/metrics")[2].decode()
    found = re.findall(r'meshrec_(?:histories_total|kept_history_bytes)\{model="hstu"(.*)\} (\S+)', text)
    named = {name.split('"')[1] if name else "bytes": float(value) for name, value in found}
    return named.get("hit", 0), named.get("miss", 0), named.get("bytes", 0)


@pytest.mark.parametrize(("most", "others"), [(100 * ROWS, []), (3 * ROWS, ["again"])])
def test_kept_histories_change_no_answer(folder, most, others, monkeypatch):
    open_with(monkeypatch, Predictor, check_package)
    models = dict.fromkeys(["hstu", *others], folder / "hstu")
    predictor, num = Predictor(folder / "hstu"), 0
    with running(models, keep_histories=most) as server:
        client = Client(server.url)
        for asked in rounds(random.Random(most)):
            num += sum(bool(each["history"]) for each in asked)
            status, _, found = client("POST", "/embed/hstu", asked)
            assert status == 200, found
            expected = vectors_of(predictor, asked)
            torch.testing.assert_close(torch.tensor(found["vectors"]), expected, rtol=1e-5, atol=1e-5)
            _, _, best = client("POST", "/recommend/hstu?k=5", asked)
            assert [len(each) for each in best["items"]] == [5] * len(asked)
        hits, misses, num_bytes = figures(client)
        assert hits + misses == 2 * num
        assert hits >= num  # the second request for a history always is one
        assert 0 < num_bytes <= most
        wrong = {"history": [1] * (LONGEST + 1), "times": [0] * (LONGEST + 1), "seen": []}
        status, _, said = client("POST", "/recommend/hstu", wrong)
        assert (status, "max_length is 40" in said["error"]) == (400, True)
        status, _, said = client("POST", "/recommend/hstu", {**wrong, "history": [1, 2], "times": [0]})
        assert (status, "2 items but 1 times" in said["error"]) == (400, True)
        client.close()


def draw_delta(folder, number, weights):
    """Publish a delta of 50 rows and of a layer, and return the weights with it."""
    torch.manual_seed(number)
    table = next(name for name, each in weights.items() if each.shape == (NUM_ITEMS, WIDTH))
    layer = next(name for name in weights if name.endswith("blocks.0.projections.weight"))
    ids, rows = torch.randperm(NUM_ITEMS)[:50].sort().values, torch.randn(50, WIDTH)
    whole = {layer: torch.randn_like(weights[layer])}
    publish(folder, number, ids=ids.tolist(), table=table, values=(rows, whole))
    return {**weights, **whole, table: weights[table].index_copy(0, ids, rows)}


def test_deltas_empty_what_each_worker_keeps(folder, tmp_path):
    """Two workers answer while deltas arrive: every answer is that of the weights whose version it names."""
    chosen, predictor = random.Random(0), Predictor(folder / "hstu")
    asked = [
        {"history": items, "times": times, "seen": []}
        for items, times in (draw_history(chosen, num) for num in (LONGEST, 7, 0, 20))
    ]
    arguments = ["serve", folder / "hstu", "--keep-histories", 100 * ROWS, "--workers", 2]
    arguments += ["--deltas", f"hstu={tmp_path}"]
    weights, before = dict(predictor.weights), vectors_of(predictor, asked)
    with program(*arguments, main=SERVE) as (_, url, log):
        until(lambda: sum("is ready" in line for line in log) == 2, log)
        for number in (2, 3, 4):  # the package is of the step of delta 1
            weights = draw_delta(tmp_path, number, weights)
            for name, value in weights.items():
                predictor.weights[name].copy_(value)
            expected, num_fresh = vectors_of(predictor, asked), 0
            assert not torch.allclose(expected, before, atol=0.1)
            while num_fresh < 12:
                client = Client(url)  # a connection of its own, so that any worker may answer
                status, _, found = client("POST", "/embed/hstu", asked)
                client.close()
                assert status == 200, found
                if not found["version"].endswith(f"+{number}"):
                    continue
                num_fresh += 1
                torch.testing.assert_close(torch.tensor(found["vectors"]), expected, rtol=1e-5, atol=1e-5)
            before = expected
        client = Client(url)
        hits, misses, _ = figures(client)
        assert hits > misses >= 3 * len(asked[:2])
        client.close()


def test_a_model_that_keeps_nothing_says_so(folder, monkeypatch, caplog):
    open_with(monkeypatch, Predictor, check_package)
    with caplog.at_level("INFO"), running({"gru": folder / "gru"}, keep_histories=1 << 20) as server:
        client = Client(server.url)
        asked = {"history": [1, 2], "times": [], "seen": []}
        assert client("POST", "/recommend?k=5", asked)[0] == 200
        client.close()
    assert "history cache" in caplog.text


def test_weights_of_another_form_are_refused(folder):
    predictor = Predictor(folder / "hstu")
    encoder = predictor.items.encoder
    assert EncoderSpec.from_json(encoder.to_json()) == encoder
    other = encoder._replace(sizes={**encoder.sizes, "num_blocks": encoder.sizes["num_blocks"] + 1})
    with pytest.raises(PackageError, match="Export"):
        IncrementalQueries(other, predictor.weights, normalise=True)
    with pytest.raises(PackageError, match="'LSTM'"):
        EncoderSpec.from_json(encoder.to_json().replace("HSTU", "LSTM"))
