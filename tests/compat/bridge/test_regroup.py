import pytest
import torch

from meshrec.compat.bridge.fx import symbolic_trace
from meshrec.compat.bridge.regroup import KTRegroupAsDict, PermuteMultiEmbedding
from meshrec.compat.bridge.sparse import KeyedTensor, fbgemm
from meshrec.compat.bridge.sparse.regrouping import _all_keys_used_once, kt_regroup_arguments
from meshrec.modules import DataType


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.filterwarnings("ignore:The TorchScript type system:UserWarning")
@pytest.mark.parametrize("dtype", [None, DataType.FP16])
def test_groups_in_graphs_and_script_are_those_of_python(dtype):
    kts = [KeyedTensor(["a", "b"], [1, 2], torch.rand(3, 3)), KeyedTensor(["c"], [2], torch.rand(3, 2))]
    module = KTRegroupAsDict([["a", "c"], ["b"]], ["x", "y"], emb_dtype=dtype)
    expected = module(kts)
    graph = symbolic_trace(module)
    for each in (graph, torch.jit.script(module)):
        found = each(kts)
        assert list(found) == ["x", "y"]
        for key, values in expected.items():
            assert torch.equal(found[key], values)
            assert values.dtype == (torch.float32 if dtype is None else torch.float16)


@pytest.mark.parametrize("groups", [[["a", "d"], ["b", "c"]], [["a", "b", "b"], ["b", "d"]]])
def test_gradients_are_those_of_the_function(groups):
    names = [["a", "b"], ["c", "d"]]
    kts = [
        KeyedTensor.from_tensor_list(own, [torch.rand(5, width, requires_grad=True) for _ in own])
        for own, width in zip(names, (2, 3), strict=True)
    ]
    module = KTRegroupAsDict(groups, ["x", "y"], multi_device=True)

    def gradients(found):
        loss = (found["x"].sum(1) * found["y"].sum(1)).sum()
        return torch.autograd.grad(loss, [kt.values() for kt in kts])

    expected = KeyedTensor.regroup_as_dict(keyed_tensors=kts, groups=groups, keys=["x", "y"])
    for mine, theirs in zip(gradients(module(kts)), gradients(expected), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert _all_keys_used_once(kts, groups) == (
        sorted(name for group in groups for name in group) == list("abcd")
    )


@pytest.fixture
def operators():
    fbgemm.register_fbgemm_operators()
    yield
    fbgemm.remove_fbgemm_operators()


def test_permutation_by_description(operators):
    values = [torch.arange(6.0).view(2, 3), torch.arange(4.0).view(2, 2)]
    permute = PermuteMultiEmbedding([["b", "c"], ["a"]])
    assert permute(values) is values
    permute.init_tensors(
        *kt_regroup_arguments(values[0], [["a", "b"], ["c"]], [[1, 2], [2]], permute._groups)
    )
    permute.set_device("cpu")
    first, second = permute(values)
    assert first.tolist() == [[1, 2, 0, 1], [4, 5, 2, 3]]
    assert second.tolist() == [[0], [3]]
