"""Requests as the clients of other servers send them, recorded by `make clients` (`real_clients.py`)."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.serve.conftest import Client
from tests.serve.test_raw_values import rows, served

__all__ = ["served"]
RECORDED = Path(__file__).with_name("recorded")
CLIENTS = os.environ.get("MESHREC_CLIENTS")
ROWS = [0, 1, 2, *(row for row, each in enumerate(rows()) if None in each.values())][:6]
recorded = [each for path in sorted(RECORDED.glob("*.json")) for each in json.loads(path.read_text())]


@pytest.mark.parametrize("sent", recorded, ids=[each["client"] for each in recorded])
def test_requests_of_other_clients_get_the_scores_of_prediction(served, sent):
    client = Client(served[0].url)
    length = sent["header_length"]
    body = sent["body"].encode() if length is None else bytes.fromhex(sent["body"])
    headers = {} if length is None else {"Inference-Header-Content-Length": str(length)}
    status, headers, answer = client("POST", "/v2/models/shop/infer", body, headers)
    client.close()
    assert status == 200, answer
    if (length := headers.get("Inference-Header-Content-Length")) is not None:
        scores = np.frombuffer(answer[int(length) :], "<f4")
    else:
        scores = answer["outputs"][0]["data"]
    np.testing.assert_allclose(scores, served[1][ROWS], rtol=1e-5)


@pytest.mark.skipif(CLIENTS is None, reason="`make clients` installs the clients")
@pytest.mark.parametrize("library", ["mlserver", "kserve"])
def test_the_clients_themselves_get_the_scores_of_prediction(served, tmp_path, library):
    (tmp_path / "rows").write_text(json.dumps([rows()[row] for row in ROWS]))
    program, out = Path(__file__).with_name("real_clients.py"), RECORDED / f"{library}.json"
    python = Path(CLIENTS) / library / "bin/python"
    subprocess.run([python, program, tmp_path / "rows", served[0].url, out], check=True)
    for sent in json.loads(out.read_text()):
        np.testing.assert_allclose(sent["scores"], served[1][ROWS], rtol=1e-5, err_msg=sent["client"])
