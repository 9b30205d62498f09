"""Module which gathers features from several KeyedTensors into groups."""

from collections.abc import Sequence

from torch import Tensor, nn

from meshrec.modules.embedding_configs import DataType
from meshrec.sparse import KeyedTensor


class KTRegroupAsDict(nn.Module):
    """Concatenation of feature columns, from several KeyedTensors, into a tensor per feature group.

    This is ``KeyedTensor.regroup_as_dict`` with fixed groups.

    Args:
        groups: Features in every group. A feature may be in several groups.
        keys: Group names.
        emb_dtype: Output data type; None: the embedding data type.

    Raises:
        ValueError: The numbers of groups and keys differ.
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
