"""Web pages and other machines may not change a server that asks for no token."""

import pytest

from meshrec.serve import ServerOptions
from meshrec.serve.options import listen
from tests.serve.conftest import Client, running

UNLOAD = "/v2/repository/models/clicks/unload"


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"Host": "evil.example"}, "the header Host is 'evil.example'"),
        ({"Host": ""}, "the header Host is ''"),
        ({"Origin": "http://evil.example"}, "the header Origin is 'http://evil.example'"),
        ({"Origin": "null"}, "the header Origin is 'null'"),
        ({"Sec-Fetch-Site": "cross-site"}, "of other sites"),
    ],
)
def test_web_pages_do_not_unload_models(server, headers, message):
    client = Client(server.url)
    for path in (UNLOAD, UNLOAD.replace("unload", "load"), UNLOAD.replace("unload", "rollback/1")):
        status, _, said = client("POST", path, b"", headers)
        assert (status, message in said["error"]) == (403, True)
    assert client("GET", "/v2/health/ready")[0] == 200
    client.close()


def test_known_names_and_tokens_do(packages):
    with running({"clicks": packages[0]}, hosts=("models.example",)) as server:
        client = Client(server.url)
        for host in ("models.example:80", "localhost:1", "[::1]:1", "10.0.0.1"):
            headers = {"Host": host, "Origin": f"http://{host}"}
            assert client("POST", UNLOAD, b"", headers)[0] == 200
        client.close()
    with running({"clicks": packages[0]}, token="t") as server:
        client = Client(server.url)
        assert client("POST", UNLOAD, b"", {"Host": "x", "Authorization": "Bearer t"})[0] == 200
        client.close()


def test_changes_can_be_switched_off(packages):
    with running({"clicks": packages[0]}, admin=False) as server:
        client = Client(server.url)
        status, _, said = client("POST", UNLOAD)
        assert (status, "--no-admin" in said["error"]) == (403, True)
        client.close()


def test_other_machines_need_a_token():
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ValueError, match="clients"):
            listen(ServerOptions(host=host, port=0))
    listen(ServerOptions(host="0.0.0.0", port=0, token="t")).close()
