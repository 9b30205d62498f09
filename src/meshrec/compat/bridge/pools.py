"""Single-rank pools that store rows or bags by ID: ``update`` writes, ``lookup`` reads."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from meshrec.compat.bridge.sparse import KeyedJaggedTensor

# P entries, I IDs, F features, D width

T = TypeVar("T")


class ObjectPool(nn.Module, ABC, Generic[T]):
    """Base class for pools with IDs in [0, pool_size). For duplicate IDs in an update, the last wins."""

    def __init__(self, pool_size: int, device: torch.device | None) -> None:
        super().__init__()
        self._pool_size = pool_size
        self._device = torch.device("meta") if device is None else torch.device(device)

    @property
    def pool_size(self) -> int:
        """Number of entries."""
        return self._pool_size

    @property
    def device(self) -> torch.device:
        """Device of the pool; ``meta`` by default."""
        return self._device

    @abstractmethod
    def lookup(self, ids: Tensor) -> T:
        """Return the entries for IDs [I]."""

    @abstractmethod
    def update(self, ids: Tensor, values: T) -> None:
        """Store new values for IDs [I]."""

    def forward(self, ids: Tensor) -> T:
        """Return ``lookup(ids)``."""
        return self.lookup(ids)

    def _checked(self, ids: Tensor) -> Tensor:
        """Return the IDs as int64. Raises ValueError if they are not a vector of integers within the pool."""
        if ids.dim() != 1 or ids.is_floating_point() or ids.device != self._device:
            raise ValueError(
                f"ids must be one row of integers on {self._device}, got {ids.dtype} {list(ids.shape)} on "
                f"{ids.device}."
            )
        # Tensors on ``meta`` have no values to check.
        if not ids.is_meta and ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= self._pool_size):
            raise ValueError(
                f"ids must be from 0 to {self._pool_size - 1}, got {int(ids.min())} to {int(ids.max())}. "
                "Make the pool larger."
            )
        return ids.long()


class TensorPool(ObjectPool[Tensor]):
    """Pool of fixed-width rows, initially zeros.

    Args:
        pool_size: number of rows P.
        dim: width D.
        dtype: element type.
        device: pool device.
        loaded_values: initial rows [P, D].
        enable_uvm: must be False.
    """

    _pool: Tensor

    def __init__(
        self,
        pool_size: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        loaded_values: Tensor | None = None,
        enable_uvm: bool = False,
    ) -> None:
        super().__init__(pool_size, device)
        _refuse_uvm(enable_uvm)
        rows = torch.zeros(pool_size, dim, dtype=dtype, device=self._device)
        if loaded_values is not None:
            _check_rows("loaded_values", loaded_values, rows, pool_size)
            rows = loaded_values
        self.register_buffer("_pool", rows)

    @property
    def dim(self) -> int:
        """Row width."""
        return self._pool.size(1)

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return self._pool.dtype

    @property
    def pool(self) -> Tensor:
        """All rows [P, D]."""
        return self._pool

    def lookup(self, ids: Tensor) -> Tensor:
        """Return rows for the IDs, [I, D].

        Raises:
            ValueError: an ID is outside the pool.
        """
        return self._pool[self._checked(ids)]

    def update(self, ids: Tensor, values: Tensor) -> None:
        """Store rows ``values`` [I, D].

        Raises:
            ValueError: an ID is outside the pool, or ``values`` has the wrong shape, dtype or device.
        """
        indices = self._checked(ids)
        _check_rows("values", values, self._pool, indices.numel())
        last = _last_duplicates(indices)
        self._pool[indices[last]] = values[last]


class KeyedJaggedTensorPool(ObjectPool[KeyedJaggedTensor]):
    """Pool with a bag per feature for every ID, initially empty.

    Args:
        pool_size: number of entries P.
        feature_max_lengths: maximum bag length by feature.
        values_dtype: value type.
        is_weighted: whether to store float32 weights too.
        device: pool device.
        enable_uvm: must be False.
    """

    values: Tensor
    key_lengths: Tensor
    weights: Tensor

    def __init__(
        self,
        pool_size: int,
        feature_max_lengths: Mapping[str, int],
        values_dtype: torch.dtype = torch.int64,
        is_weighted: bool = False,
        device: torch.device | None = None,
        enable_uvm: bool = False,
    ) -> None:
        super().__init__(pool_size, device)
        _refuse_uvm(enable_uvm)
        self._feature_max_lengths = dict(feature_max_lengths)
        self._is_weighted = is_weighted
        # First column per feature in the padded buffers below, whose names and shapes are TorchRec's.
        self._starts = list(accumulate(self._feature_max_lengths.values(), initial=0))
        shape = (pool_size, self._starts[-1])
        self.register_buffer("values", torch.zeros(shape, dtype=values_dtype, device=self._device))
        lengths = torch.zeros(
            pool_size, len(self._feature_max_lengths), dtype=torch.int32, device=self._device
        )
        self.register_buffer("key_lengths", lengths)
        if is_weighted:
            self.register_buffer("weights", torch.zeros(shape, device=self._device))

    @property
    def feature_max_lengths(self) -> dict[str, int]:
        """Maximum bag length by feature."""
        return self._feature_max_lengths

    @property
    def values_dtype(self) -> torch.dtype:
        """Value type."""
        return self.values.dtype

    @property
    def is_weighted(self) -> bool:
        """Whether weights are stored too."""
        return self._is_weighted

    def lookup(self, ids: Tensor) -> KeyedJaggedTensor:
        """Return I bags for every feature.

        Raises:
            ValueError: an ID is outside the pool.
        """
        indices = self._checked(ids)
        lengths = self.key_lengths[indices]  # [I, F]
        values, weights = [], []
        for i, length in enumerate(self._feature_max_lengths.values()):
            columns = slice(self._starts[i], self._starts[i + 1])
            counts = torch.arange(length, device=self._device) < lengths[:, i, None]
            values.append(self.values[indices, columns][counts])
            if self._is_weighted:
                weights.append(self.weights[indices, columns][counts])
        return KeyedJaggedTensor.from_lengths_sync(
            list(self._feature_max_lengths),
            torch.cat(values),
            # A KeyedJaggedTensor has the lengths of all bags key by key.
            lengths.t().flatten(),
            torch.cat(weights) if self._is_weighted else None,
            stride=indices.numel(),
        )

    def update(self, ids: Tensor, values: KeyedJaggedTensor) -> None:
        """Store bags for all features in the pool. Other keys are ignored.

        Raises:
            ValueError: an ID is outside the pool, or a feature's bags do not fit. The message names the first
                one.
        """
        indices = self._checked(ids)
        # Checks every feature before the first write, so that a failed update changes nothing.
        bags = [self._bags_of(name, values, indices.numel()) for name in self._feature_max_lengths]
        last = _last_duplicates(indices)
        written = indices[last]
        for i, (lengths, padded, weights) in enumerate(bags):
            columns = slice(self._starts[i], self._starts[i + 1])
            self.key_lengths[written, i] = lengths[last].to(torch.int32)
            self.values[written, columns] = padded[last]
            if weights is not None:
                self.weights[written, columns] = weights[last]

    def _bags_of(self, name: str, values: KeyedJaggedTensor, num_ids: int) -> tuple[Tensor, Tensor, Any]:
        """Return the bags of a feature, checked and padded, for storage.

        Args:
            num_ids: number of bags that the feature must have.

        Returns:
            Bag lengths, padded values, and padded weights or None.
        """
        if name not in values.index_per_key():
            raise ValueError(
                f"the pool keeps the feature {name!r}, and the input has {values.keys()}. Add it."
            )
        bags, limit = values[name], self._feature_max_lengths[name]
        lengths = bags.lengths()
        if lengths.numel() != num_ids or bags.values().dtype != self.values.dtype:
            raise ValueError(
                f"feature {name!r} must have {num_ids} bags of {self.values.dtype}, got {lengths.numel()} of "
                f"{bags.values().dtype}. Give one bag per id."
            )
        if num_ids and int(lengths.max()) > limit:
            raise ValueError(
                f"feature {name!r} has a bag of {int(lengths.max())}, and the pool keeps {limit}. "
                "Cut the bags, or raise feature_max_lengths."
            )
        weights = bags.to_padded_dense_weights(limit) if self._is_weighted else None
        return lengths, bags.to_padded_dense(limit), weights


def _last_duplicates(ids: Tensor) -> Tensor:
    """Return positions of IDs without a later duplicate."""
    # Indexed assignment with duplicates has no defined order, so duplicates are removed first. Stable: equal
    # IDs keep their order, and the last of a run is the latest.
    order = torch.argsort(ids, stable=True)
    ordered = ids[order]
    is_last = torch.ones_like(ordered, dtype=torch.bool)
    is_last[:-1] = ordered[1:] != ordered[:-1]
    return order[is_last]


def _check_rows(name: str, rows: Tensor, pool: Tensor, count: int) -> None:
    """Raise ValueError unless rows have the dtype, device and width of the pool, and the given count."""
    if rows.shape != (count, pool.size(1)) or rows.dtype != pool.dtype or rows.device != pool.device:
        raise ValueError(
            f"{name} must be {pool.dtype} [{count}, {pool.size(1)}] on {pool.device}, got {rows.dtype} "
            f"{list(rows.shape)} on {rows.device}."
        )


def _refuse_uvm(enable_uvm: bool) -> None:
    if enable_uvm:
        raise ValueError("enable_uvm is not to be had: a pool is where device says. Pass device='cpu'.")
