"""KeyedTensors in new groups, in all the ways that TorchRec has or had."""

import sys

import pytest
import torch

from meshrec.compat.bridge import finder
from meshrec.compat.bridge.names import MODULES
from meshrec.compat.bridge.sparse import KeyedTensor
from meshrec.compat.bridge.sparse.fbgemm import register_fbgemm_operators, remove_fbgemm_operators

# torch warns of the end of TorchScript; TorchRec's programs use it.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

GROUPS = [["a", "c"], ["b", "a"]]


def tensors() -> list[KeyedTensor]:
    torch.manual_seed(0)
    return [KeyedTensor(["a", "b"], [1, 2], torch.rand(3, 3)), KeyedTensor(["c"], [2], torch.rand(3, 2))]


@pytest.mark.parametrize(
    "name",
    ["regroup_kts", "permute_multi_embedding", "_regroup_keyed_tensors", "_fbgemm_permute_pooled_embs"],
)
def test_every_name_regroups(name):
    way, kts = finder._resolve(MODULES["torchrec.sparse.jagged_tensor"][name]), tensors()
    expected = [torch.cat([kts[0]["a"], kts[1]["c"]], 1), torch.cat([kts[0]["b"], kts[0]["a"]], 1)]
    for found, group in zip(way(kts, GROUPS), expected, strict=True):
        assert torch.equal(found, group)


def test_script_regroups():
    def regroup(kts: list[KeyedTensor]) -> dict[str, torch.Tensor]:
        return KeyedTensor.regroup_as_dict(kts, [["a", "c"], ["b", "a"]], ["x", "y"])

    found, expected = torch.jit.script(regroup)(tensors()), regroup(tensors())
    assert all(torch.equal(found[key], expected[key]) for key in ("x", "y"))


@pytest.fixture
def operators():
    register_fbgemm_operators()
    yield
    remove_fbgemm_operators()
    assert not hasattr(torch.ops.fbgemm, "regroup_keyed_tensor") or "fbgemm_gpu" in sys.modules


def test_operators_of_fbgemm(operators):
    kts = tensors()
    values = [kt.values() for kt in kts]
    keys, lengths = [kt.keys() for kt in kts], [kt.length_per_key() for kt in kts]
    permutes, ins, outs, widths = torch.ops.fbgemm.kt_regroup_arguments(values[0], keys, lengths, GROUPS)
    assert permutes.tolist() == [
        [0, 0, 0, 0, 1, 3],
        [1, 0, 0, 1, 2, 0],
        [0, 1, 1, 0, 2, 0],
        [0, 1, 0, 2, 1, -4],
    ]
    assert (ins.tolist(), outs.tolist(), widths) == ([3, 2], [3, 3], [3, 3])
    expected = KeyedTensor.regroup(kts, GROUPS)
    for found in (
        torch.ops.fbgemm.permute_multi_embedding(values, permutes, ins, outs, widths),
        torch.ops.fbgemm.regroup_keyed_tensor(values, keys, lengths, GROUPS),
    ):
        assert all(map(torch.equal, found, expected))
    swapped = torch.ops.fbgemm.permute_pooled_embs_auto_grad(
        values[0],
        torch.tensor([0, 1, 3]),
        torch.tensor([1, 0]),
        torch.tensor([0, 2, 3]),
        torch.tensor([1, 0]),
    )
    assert torch.equal(swapped, torch.cat([kts[0]["b"], kts[0]["a"]], 1))
