"""FBGEMM's operators on jagged tensors, as models call them, with their gradients."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torchrec
from torch import Tensor

ops = torch.ops.fbgemm
offsets = torch.tensor([0, 2, 2, 5])
inner = torch.tensor([0, 1, 3, 3, 4, 6])
lengths = torch.tensor([2, 0, 3])
rows = torch.arange(10.0).view(5, 2)
dense = torch.arange(12.0).view(3, 2, 2)
found: dict[str, Any] = {"version": torchrec.__version__ > "1"}


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


def call(name: str, *arguments: Any) -> None:
    found[f"{name} {len(found)}"] = plain(getattr(ops, name)(*arguments))


def call_with_gradient(name: str, values: Tensor, *arguments: Any) -> None:
    leaf = values.clone().requires_grad_()
    result = getattr(ops, name)(leaf, *arguments)
    result = result[0] if isinstance(result, list | tuple) else result
    (result * torch.arange(1.0, result.numel() + 1).view(result.shape)).sum().backward()
    found[f"{name} {len(found)}"] = [plain(result), plain(leaf.grad)]


call_with_gradient("jagged_2d_to_dense", rows, offsets, 2)
call_with_gradient("jagged_2d_to_dense", rows, offsets, 4)
call("jagged_1d_to_dense", torch.arange(5), offsets, 2, -1)
call_with_gradient("jagged_to_padded_dense", torch.arange(5.0), [offsets], [4], 7.0)
call_with_gradient("jagged_to_padded_dense", torch.arange(12.0).view(6, 2), [offsets, inner], [2, 3], -1.0)
call("jagged_to_padded_dense", rows, [offsets], [0], 7.0)
call_with_gradient("dense_to_jagged", dense, [offsets])
call_with_gradient("dense_to_jagged", torch.arange(36.0).view(3, 2, 3, 2), [offsets, inner])
call("dense_to_jagged", dense, [offsets], 4)
call_with_gradient("jagged_dense_elementwise_add", rows, [offsets], torch.ones(3, 4, 2))
call_with_gradient("jagged_dense_elementwise_add_jagged_output", rows, [offsets], dense)
call("jagged_dense_dense_elementwise_add_jagged_output", rows, [offsets], dense, dense)
call_with_gradient("jagged_dense_elementwise_mul", rows, [offsets], dense)
call_with_gradient("batched_dense_vec_jagged_2d_mul", torch.arange(18.0).view(6, 3), rows, offsets)
call("stacked_jagged_2d_to_dense", rows, torch.tensor([[1, 1], [2, 1]]), [0, 2, 5], [2, 1])
call("stacked_jagged_1d_to_dense", torch.arange(5), torch.tensor([[1, 1], [2, 1]]), [0, 2, 5], [2, 1], 9)
call_with_gradient("jagged_index_select", rows, lengths, torch.tensor([2, 0, 2]))
call("asynchronous_complete_cumsum", torch.tensor([[1, 2], [3, 4]]))
call("asynchronous_inclusive_cumsum", torch.tensor([1, 2, 3], dtype=torch.int32))
call("asynchronous_exclusive_cumsum", torch.tensor([1, 2, 3]))
call("offsets_range", torch.tensor([0, 2, 4]), 7)
call("invert_permute", torch.tensor([2, 0, 1]))
call("segment_sum_csr", 2, torch.tensor([0, 1, 3]), torch.arange(6.0))
permute = torch.tensor([2, 0], dtype=torch.int32)
call("permute_1D_sparse_data", permute, lengths, torch.arange(5), torch.arange(5.0))
permute = torch.tensor([1, 0, 1], dtype=torch.int32)
call("permute_2D_sparse_data", permute, torch.tensor([[2, 0], [1, 2]]), torch.arange(5))

Path(sys.argv[1]).write_text(json.dumps(found))
