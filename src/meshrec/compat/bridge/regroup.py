"""KTRegroupAsDict for TorchScript and torch.fx."""

import torch
from torch import Tensor, nn

from meshrec.compat.bridge.sparse import KeyedTensor
from meshrec.modules import regroup as core
from meshrec.modules.embedding_configs import DataType


class PermuteMultiEmbedding(nn.Module):
    """Module that regroups KeyedTensor values with FBGEMM's regroup arguments; see ``kt_regroup_arguments``.

    Before ``init_tensors``, the module returns the values unchanged.

    Args:
        groups: keys per group.
        multi_device: whether the regroup arguments follow the values to another device.
    """

    _permutes: Tensor
    _in_shapes: Tensor
    _out_shapes: Tensor
    _out_lengths: list[int] | None

    def __init__(self, groups: list[list[str]], multi_device: bool = False) -> None:
        super().__init__()
        # `_out_lengths` is None until `init_tensors`. Until then, `forward` returns its input.
        self._groups, self._multi_device, self._out_lengths = groups, multi_device, None
        for name in ("_permutes", "_in_shapes", "_out_shapes"):
            self.register_buffer(name, torch.empty(0), persistent=False)

    def init_tensors(
        self, permute: Tensor, in_shapes: Tensor, out_shapes: Tensor, out_lengths: list[int]
    ) -> None:
        """Set the regroup arguments, as returned by ``kt_regroup_arguments``.

        Args:
            permute: a row per slice to copy from an input to an output, int32 [P, 6].
            in_shapes: input widths, int32.
            out_shapes: output widths, int32.
            out_lengths: output widths as a list.
        """
        self._permutes, self._in_shapes, self._out_shapes = permute, in_shapes, out_shapes
        self._out_lengths = out_lengths

    def set_device(self, device: str) -> None:
        """Move the regroup arguments to a device."""
        self.to(device)

    def forward(self, values: list[Tensor]) -> list[Tensor]:
        """Return a tensor per group."""
        if self._out_lengths is None:
            return values
        where = values[0].device if self._multi_device else self._permutes.device
        arguments = [tensor.to(where) for tensor in (self._permutes, self._in_shapes, self._out_shapes)]
        permute = torch.ops.fbgemm.permute_multi_embedding
        result: list[Tensor] = permute(values, *arguments, self._out_lengths)
        return result


def to_tensor_dict(keys: list[str], values: list[Tensor]) -> dict[str, Tensor]:
    """Return the values by key."""
    return dict(zip(keys, values, strict=True))


class KTRegroupAsDict(core.KTRegroupAsDict):
    """``KeyedTensor.regroup_as_dict`` with fixed groups; see ``meshrec.modules.regroup``."""

    _groups: list[list[str]]
    _keys: list[str]
    _dtype: torch.dtype | None

    def __init__(
        self,
        groups: list[list[str]],
        keys: list[str],
        emb_dtype: DataType | None = None,
        multi_device: bool = False,
    ) -> None:
        # multi_device is ignored: the module holds no tensors, so it works on any device.
        super().__init__(groups, keys, emb_dtype)

    def forward(self, keyed_tensors: list[KeyedTensor]) -> dict[str, Tensor]:
        grouped = KeyedTensor.regroup_as_dict(keyed_tensors, self._groups, self._keys)
        dtype = self._dtype
        if dtype is None:
            return grouped
        cast: dict[str, Tensor] = {}
        for key in self._keys:
            cast[key] = grouped[key].to(dtype)
        return cast
