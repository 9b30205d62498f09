"""A package that would end the process that loads it never ends a server."""

import pytest

from tests.serve.conftest import Client, link, running, samples
from tests.serve.toys import ENDS, Toy, make_toy


@pytest.mark.parametrize("how", ENDS)
def test_a_package_that_ends_its_process_is_refused_with_words(packages, tmp_path, monkeypatch, how):
    if how == "not finish":
        monkeypatch.setattr("meshrec.serve.trial._SECONDS", 1.0)
    monkeypatch.setattr(Toy, "may_end", False)  # in this process
    bad, place = make_toy(tmp_path / "bad", 666, ends=how), tmp_path / "clicks"
    link(packages[0], place)
    with running({"clicks": place}) as server:
        client = Client(server.url)
        before = client("POST", "/predict", samples(3))[2]
        link(bad, place)
        for _ in range(2):
            status, _, said = client("POST", "/v2/repository/models/clicks/load", {})
            assert status == 400
            assert how in said["error"]
            assert client("POST", "/predict", samples(3))[2] == before
            assert how in client("POST", "/v2/repository/index")[2][0]["reason"]
        link(packages[1], place)
        assert client("POST", "/v2/repository/models/clicks/load", {})[0] == 200
        assert client("POST", "/predict", samples(3))[2]["version"] == "v2"
        client.close()
