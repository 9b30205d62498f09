"""The model repository, with a stand-in for the module that Triton brings."""

import re
import runpy
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from meshrec.export import PackageError, Predictor
from meshrec.export.triton import write_triton
from tests.export.conftest import FEATURES, torchs_own_warnings


class Response:
    def __init__(self, output_tensors, error=None):
        self.outputs, self.error = output_tensors, error


@pytest.fixture
def triton(monkeypatch):
    module = SimpleNamespace(
        get_input_tensor_by_name=lambda request, name: SimpleNamespace(as_numpy=lambda: request[name]),
        Tensor=lambda name, array: (name, array),
        InferenceResponse=Response,
        TritonError=str,
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", module)
    yield
    sys.modules.pop("meshrec.export.triton_backend", None)


def request_of(dense, values, lengths):
    found = {"dense": dense.numpy()}
    for feature in FEATURES:
        found[f"{feature}.values"] = values[feature].numpy()
        found[f"{feature}.lengths"] = lengths[feature].numpy().astype(np.int32)
    return found


def test_a_repository_answers_as_the_package(triton, uncompiled, requests, tmp_path):
    folder = write_triton(uncompiled, tmp_path, name="clicks")
    model = runpy.run_path(str(folder / "1" / "model.py"))["TritonPythonModel"]()
    with torchs_own_warnings():
        model.initialize({"model_repository": str(folder), "model_version": "1"})
        predictor = Predictor(uncompiled)
    bad = request_of(*requests(2))
    bad["f0.values"] = bad["f0.values"] + 99
    first, second = model.execute([request_of(*requests(5)), bad])
    ((name, scores),) = first.outputs
    assert name == "scores"
    assert torch.equal(torch.from_numpy(scores), predictor(*requests(5)))
    assert "is outside [0, 50)" in second.error


def test_the_configuration_names_every_tensor(uncompiled, tmp_path):
    text = (write_triton(uncompiled, tmp_path, name="clicks") / "config.pbtxt").read_text()
    found = re.findall(
        r'(input|output) \[\s+\{\s+name: "(.*)"\s+data_type: TYPE_(\w+)\s+dims: \[ (.*) \]', text
    )
    assert found[0] == ("input", "dense", "FP32", "-1, 4")
    assert ("input", "f 1.lengths", "INT32", "-1") in found
    assert found[-1] == ("output", "scores", "FP32", "-1")
    assert len(found) == 2 + 2 * len(FEATURES)
    with pytest.raises(ValueError, match="exists"):
        write_triton(uncompiled, tmp_path, name="clicks")
    with pytest.raises(PackageError, match="package"):
        write_triton(tmp_path, tmp_path, name="other")
