"""Module that regroups the pieces of several KeyedTensors."""

from collections.abc import Sequence

from torch import Tensor, nn

from meshrec.modules.embedding_configs import DataType
from meshrec.sparse import KeyedTensor


class KTRegroupAsDict(nn.Module):
    """``KeyedTensor.regroup_as_dict`` with fixed groups.

    Args:
        groups: Features of each group. A feature may be in several groups.
        keys: Name of each group.
        emb_dtype: Output data type; None: that of the embeddings.

    Raises:
        ValueError: Groups and keys differ in number.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[str]],
        keys: Sequence[str],
        emb_dtype: DataType | None = None,
    ) -> None:
        super().__init__()
        if len(groups) != len(keys):
            raise ValueError(f"each group needs a key: got {len(groups)} groups and {len(keys)} keys.")
        # Copied: the caller may change the lists.
        self._groups = [list(group) for group in groups]
        self._keys = list(keys)
        self._dtype = None if emb_dtype is None else emb_dtype.dtype

    def forward(self, keyed_tensors: Sequence[KeyedTensor]) -> dict[str, Tensor]:
        """Return one tensor [B, sum of D] per group, by name.

        Raises:
            ValueError: A feature is not in any KeyedTensor.
        """
        grouped = KeyedTensor.regroup_as_dict(list(keyed_tensors), self._groups, self._keys)
        if self._dtype is None:
            return grouped
        return {key: values.to(self._dtype) for key, values in grouped.items()}
