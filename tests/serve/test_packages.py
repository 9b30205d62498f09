"""Servers of real packages, where other tests serve toys."""

import os
import shutil

import numpy as np
import pytest
import torch

import meshrec
from meshrec.export import Predictor, check_package, export, read_private_key, sign_package
from meshrec.models.dlrm import DLRM
from meshrec.ops.library import has_kernels
from tests.export.conftest import torchs_own_warnings
from tests.serve.conftest import Client, link, running, samples, scores_of
from tests.serve.toys import FEATURES, NUM_DENSE, open_with


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    torch.manual_seed(0)
    tables = [
        meshrec.EmbeddingBagConfig(name=f"t_{f}", embedding_dim=4, num_embeddings=50, feature_names=[f])
        for f in FEATURES
    ]
    model = DLRM(meshrec.EmbeddingBagCollection(tables), NUM_DENSE, [8, 4], [8, 1])
    folder = tmp_path_factory.mktemp("exported") / "clicks"
    with torchs_own_warnings():
        return export(model, folder, features=FEATURES, num_dense=NUM_DENSE, compile=False)


@pytest.fixture
def package(exported, tmp_path):
    return shutil.copytree(exported, tmp_path / "good")


def test_a_package_is_served(package, monkeypatch):
    open_with(monkeypatch, Predictor, check_package)
    with torchs_own_warnings(), running({"clicks": package}) as server:
        predictor, client, given = Predictor(package), Client(server.url), samples(5)
        said = client("POST", "/predict", given)[2]
        assert said["version"] == predictor.version
        np.testing.assert_allclose(said["scores"], scores_of(predictor, given), rtol=1e-5)
        given[3]["item"] = [50]
        status, _, said = client("POST", "/predict", given)
        assert (status, said["error"][:48]) == (400, "feature 'item': id 50 of sample 3 is outside [0,")
        client.close()


def test_a_damaged_package_is_refused_and_the_old_version_stays(package, tmp_path, monkeypatch):
    open_with(monkeypatch, Predictor, check_package)
    bad, place = tmp_path / "bad", tmp_path / "clicks"
    with torchs_own_warnings():
        shutil.copytree(package, bad)
        with (bad / "weights.bin").open("r+b") as file:
            file.write(b"x")
        link(package, place)
        with running({"clicks": place}) as server:
            client = Client(server.url)
            before = client("POST", "/predict", samples(5))[2]
            link(bad, place)
            status, _, said = client("POST", "/v2/repository/models/clicks/load", {})
            assert (status, "weights.bin is not what was written" in said["error"]) == (400, True)
            assert client("POST", "/predict", samples(5))[2] == before
            client.close()
        with running({"clicks": place}, verify=False) as server:
            assert server.repository.is_ready


@pytest.mark.skipif(not has_kernels, reason="needs the kernels")
def test_weights_that_are_cut_short_end_no_server(package, tmp_path, monkeypatch):
    open_with(monkeypatch, Predictor, check_package)
    place = tmp_path / "clicks"
    with torchs_own_warnings():
        shutil.copytree(package, place)
        with running({"clicks": place, "other": package}) as server:
            client = Client(server.url)
            before = client("POST", "/predict/clicks", samples(5))[2]
            os.truncate(place / "weights.bin", 0)
            status, _, said = client("POST", "/predict/clicks", samples(5))
            assert (status, "weights.bin" in said["error"]) == (503, True)
            while client("POST", "/v2/repository/index")[2][0]["state"] == "READY":
                assert client("POST", "/predict/clicks", samples(5))[0] == 503
            said = client("POST", "/v2/repository/index")[2]
            assert "weights.bin" in said[0]["reason"]
            assert said[1]["state"] == "READY"
            status, _, said = client("GET", "/v2/health/ready")
            assert (status, "weights.bin" in said["reason"]) == (503, True)
            assert client("POST", "/predict/other", samples(5))[2]["scores"] == before["scores"]
            shutil.copy(package / "weights.bin", place)
            assert client("POST", "/v2/repository/models/clicks/load", {})[0] == 200
            assert client("POST", "/predict/clicks", samples(5))[2] == before
            client.close()


def test_servers_may_require_a_signature(package, tmp_path, monkeypatch):
    pytest.importorskip("cryptography", reason="needs the extra sign")
    open_with(monkeypatch, Predictor, check_package)
    from tests.export.test_signing import write_key

    private, public = write_key(tmp_path, "ours")
    with torchs_own_warnings(), running({"clicks": package}, wait=False, public_key=public) as server:
        client = Client(server.url)
        load = "/v2/repository/models/clicks/load"
        status, _, said = client("POST", load, {})
        assert (status, "is not signed" in said["error"]) == (400, True)
        sign_package(package, read_private_key(private))
        assert client("POST", load, {})[0] == 200
        assert client("POST", "/predict", samples(5))[0] == 200
        client.close()
