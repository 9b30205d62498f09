"""Hashed tables of a package while deltas change them.

[Note: serving a hashed table] Rows of packaged IDs are overwritten in private pages of this worker. An
evicted ID gets the initial row there, which lookups then return. Rows of IDs not in the package are in
``added_rows``; ``added`` has their keys, ascending, with the row index of each. An eviction removes the key
from ``added`` and frees the row.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from meshrec.ops import nbit
from meshrec.ops.index import mix
from meshrec.ops.initial_rows import uniform_rows
from meshrec.ops.keyed import find_rows
from meshrec.tables.hashed.memory import GrowingRows

# n packaged rows, m added rows, U rows per delta


class HashedWeights:
    """Rows of a hashed table in a package's weights.

    Args:
        weights: package weights by name; tensors of this table are changed in place or replaced.
        name: name of the row tensor.
        formula: hashed table fields of the manifest: ``seed`` of the keys, ``first_seed``, ``low``, ``high``
            and ``dim`` of initial rows, and ``max_rows``.
        bits: bits per code of quantized rows; 0: floating-point rows.
    """

    def __init__(
        self, weights: MutableMapping[str, Tensor], name: str, formula: Mapping[str, Any], bits: int
    ) -> None:
        self._weights, self._name, self._formula, self._bits = weights, name, formula, bits
        self._prefix = name.removesuffix("weight")
        # Memory of added rows, from the first added row on.
        self._grown: GrowingRows | None = None
        # Indices of added rows freed by evictions.
        self._free: list[int] = []

    @property
    def max_rows(self) -> int:
        """Maximum number of rows in the table."""
        return int(self._formula["max_rows"])

    def portions(self, ids: Tensor, rows: Tensor, evicted: Tensor, step: int) -> Iterator[Callable[[], None]]:
        """Yield functions which together write changed rows and remove evicted IDs.

        Args:
            ids: changed IDs, int64 [U], ascending.
            rows: rows of these IDs, in table format.
            evicted: evicted IDs, int64, disjoint from ``ids``.
            step: maximum rows per in-place write.
        """
        seed = self._formula["seed"]
        evicted_keys, keys = mix(evicted, seed), mix(ids, seed)
        rows_in_package, is_here = self._packaged(evicted_keys)
        initial = self._initial_rows(evicted[is_here])
        yield from self._write_portions(self._weights[self._name], rows_in_package[is_here], initial, step)
        yield lambda: self._remove(evicted_keys[~is_here])
        rows_in_package, is_here = self._packaged(keys)
        yield from self._write_portions(
            self._weights[self._name], rows_in_package[is_here], rows[is_here], step
        )
        keys, order = keys[~is_here].sort()
        yield lambda: self._add_rows(keys, rows[~is_here][order])

    def _write_portions(
        self, target: Tensor, indices: Tensor, rows: Tensor, step: int
    ) -> Iterator[Callable[[], None]]:
        """Yield functions which write ``rows`` to ``target[indices]``, ``step`` rows each."""
        for part, values in zip(indices.split(step), rows.split(step), strict=True):
            yield lambda part=part, values=values: target.index_copy_(0, part, values)  # type: ignore[misc]

    def _remove(self, keys: Tensor) -> None:
        """Remove keys from ``added`` and free the rows; absent keys are ignored."""
        added = self._weights[f"{self._prefix}added"]
        stays = ~torch.isin(added[0], keys)
        self._free += added[1][~stays].tolist()
        self._weights[f"{self._prefix}added"] = added[:, stays].contiguous()

    def _add_rows(self, keys: Tensor, rows: Tensor) -> None:
        """Write rows of IDs not in the package. A new ID gets a freed row, else a row at the end."""
        if len(keys) == 0:
            return
        added = self._weights[f"{self._prefix}added"]
        positions, is_here = self._positions(added[0], keys)
        slots = torch.empty_like(keys)
        slots[is_here] = added[1][positions[is_here]]
        num_new = int((~is_here).sum())
        if self._grown is None:
            row = self._weights[f"{self._prefix}added_rows"].new_zeros(1, rows.shape[1])
            self._grown = GrowingRows([row], max_rows=self.max_rows, name=f"weight {self._name!r}")
        first = self._grown.num_rows
        num_reused = min(num_new, len(self._free))
        self._grown.grow(first + num_new - num_reused)  # may fail, so do it before taking free rows
        self._free.sort(reverse=True)
        reused = [self._free.pop() for _ in range(num_reused)]
        slots[~is_here] = torch.tensor([*reused, *range(first, self._grown.num_rows)], dtype=torch.int64)
        self._grown.tensors[0].index_copy_(0, slots, rows)
        both = torch.cat([added, torch.stack([keys, slots])[:, ~is_here]], 1)
        self._weights[f"{self._prefix}added"] = both[:, both[0].argsort()].contiguous()
        self._weights[f"{self._prefix}added_rows"] = self._grown.tensors[0]

    def _initial_rows(self, ids: Tensor) -> Tensor:
        """Compute the rows with which training initializes the IDs, in table format."""
        f = self._formula
        values = uniform_rows(ids, seed=f["first_seed"], low=f["low"], high=f["high"], columns=(0, f["dim"]))
        return nbit.quantize(values, self._bits) if self._bits else values.to(self._weights[self._name].dtype)

    def _packaged(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row index of each key in the package (-1: absent), and whether it is present."""
        rows = find_rows(self._weights[f"{self._prefix}buckets"], len(self._weights[self._name]), keys)
        return rows, rows >= 0

    @staticmethod
    def _positions(ascending: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the position of each key in ``ascending``, and whether it is present."""
        if len(ascending) == 0:
            return torch.zeros_like(keys), torch.zeros(len(keys), dtype=torch.bool)
        positions = torch.searchsorted(ascending, keys).clamp_(max=len(ascending) - 1)
        return positions, ascending[positions] == keys
