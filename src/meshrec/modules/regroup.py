"""Embeddings of several KeyedTensors in new groups, as a module."""

from collections.abc import Sequence

from torch import Tensor, nn

from meshrec.modules.embedding_configs import DataType
from meshrec.sparse import KeyedTensor


class KTRegroupAsDict(nn.Module):
    """``KeyedTensor.regroup_as_dict`` with the groups fixed.

    Args:
        groups: the features of each group; a feature may be in several.
        keys: the name of each group.
        emb_dtype: the type of the results; None: that of the embeddings.
        multi_device: changes nothing, as no tensor of its own has to be where the input is; TorchRec has it.

    Raises:
        ValueError: when groups and keys differ in number.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[str]],
        keys: Sequence[str],
        emb_dtype: DataType | None = None,
        multi_device: bool = False,
    ) -> None:
        super().__init__()
        if len(groups) != len(keys):
            raise ValueError(f"each group needs a key: got {len(groups)} groups and {len(keys)} keys.")
        self._groups = [list(group) for group in groups]
        self._keys = list(keys)
        self._dtype = None if emb_dtype is None else emb_dtype.dtype

    def forward(self, keyed_tensors: Sequence[KeyedTensor]) -> dict[str, Tensor]:
        """By group [B, sum of D].

        Raises:
            ValueError: for a feature that no KeyedTensor has.
        """
        grouped = KeyedTensor.regroup_as_dict(list(keyed_tensors), self._groups, self._keys)
        if self._dtype is None:
            return grouped
        return {key: values.to(self._dtype) for key, values in grouped.items()}
