"""A KTRegroupAsDict that TorchScript and torch.fx accept as well."""

import torch
from torch import Tensor

from meshrec.compat.bridge.sparse import KeyedTensor
from meshrec.modules import regroup as own


class KTRegroupAsDict(own.KTRegroupAsDict):
    """``KeyedTensor.regroup_as_dict`` with fixed groups; see ``meshrec.modules.regroup``."""

    _groups: list[list[str]]
    _keys: list[str]
    _dtype: torch.dtype | None

    def forward(self, keyed_tensors: list[KeyedTensor]) -> dict[str, Tensor]:
        """Return [B, sum of D] by group."""
        grouped = KeyedTensor.regroup_as_dict(keyed_tensors, self._groups, self._keys)
        dtype = self._dtype
        if dtype is None:
            return grouped
        cast: dict[str, Tensor] = {}
        for key in self._keys:
            cast[key] = grouped[key].to(dtype)
        return cast
