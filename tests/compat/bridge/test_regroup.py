import pytest
import torch

from meshrec.compat.bridge.fx import symbolic_trace
from meshrec.compat.bridge.regroup import KTRegroupAsDict
from meshrec.compat.bridge.sparse import KeyedTensor
from meshrec.modules import DataType


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
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
