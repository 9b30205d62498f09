"""A KTRegroupAsDict that TorchScript and torch.fx accept as well."""

import torch
from torch import Tensor

from meshrec.compat.bridge.sparse import KeyedTensor
from meshrec.modules import regroup as own
from meshrec.modules.embedding_configs import DataType


class KTRegroupAsDict(own.KTRegroupAsDict):
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
        # The module holds no tensors, so that it works on several devices anyway.
        super().__init__(groups, keys, emb_dtype)

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
