import socket

import torch

from meshrec.compat.bridge import test_utils
from meshrec.compat.bridge.dlrm import ModelInput
from meshrec.compat.bridge.keyed import DummyKeyedOptimizer, GradientClippingOptimizer
from meshrec.compat.bridge.sparse import KeyedJaggedTensor
from meshrec.optim.clipping import GradientClipping


def test_a_free_port_can_be_taken():
    with socket.socket() as listener:
        listener.bind(("localhost", test_utils.get_free_port()))


def test_tests_run_without_a_sanitizer(monkeypatch):
    assert test_utils.skip_if_asan_class(list) is list


def test_a_batch_moves():
    ids = KeyedJaggedTensor(["a"], torch.arange(2), lengths=torch.tensor([1, 1]))
    moved = ModelInput(torch.ones(2, 3), ids, None, torch.ones(2)).to(torch.device("cpu"))
    assert moved.idlist_features.keys() == ["a"]
    assert moved.idscore_features is None


def test_gradients_are_clipped_without_a_step():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = DummyKeyedOptimizer({"w": parameter}, {}, [{"params": [parameter]}])
    clipping = GradientClippingOptimizer(optimizer, GradientClipping.NORM, 1.0)
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clipping.clip_grad_norm_() == 5
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))
    optimizer.step()
    assert parameter.tolist() == [1.0, 1.0]
