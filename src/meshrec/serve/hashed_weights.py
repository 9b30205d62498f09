"""Hashed tables in a served package, while deltas change their rows.

[Note: serving a hashed table] A hashed table maps any int64 ID to a 64-bit key, and has rows only for
admitted IDs. In a served package, an ID is in one of two places:

- IDs which were in the table at export keep their row in ``weight``. A delta overwrites the row, in memory
  private to this worker. If training evicts the ID, its row becomes the initial row, which lookups also
  return for IDs that the table does not have.
- IDs which training admits later get a row in ``added_rows``. ``added`` [2, m] has their keys, ascending, and
  the row index per key. An eviction removes the key from ``added``, and the row is used again.
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
    """Changes the rows of a hashed table in a package's weights; see [Note: serving a hashed table].

    A key is the 64-bit hash of an ID, by which the table finds the row.

    Args:
        weights: package weights by name; tensors of this table are changed in place or replaced.
        formula: parameters of this table in the manifest: ``seed`` for the keys, ``first_seed``, ``low``,
            ``high`` and ``dim`` for initial rows, and ``max_rows``.
        bits: bits per value in quantized rows; 0: rows are floating point.
    """

    def __init__(
        self, weights: MutableMapping[str, Tensor], name: str, formula: Mapping[str, Any], bits: int
    ) -> None:
        self._weights, self._name, self._formula, self._bits = weights, name, formula, bits
        # The tensors of this table are <prefix>weight, <prefix>added, ...
        self._prefix = name.removesuffix("weight")
        # Memory for added rows; None until a delta adds the first row.
        self._growing_rows: GrowingRows | None = None
        # Indices of added rows freed by evictions.
        self._free: list[int] = []

    @property
    def max_rows(self) -> int:
        """Maximum number of rows in the table."""
        return int(self._formula["max_rows"])

    def portions(self, ids: Tensor, rows: Tensor, evicted: Tensor, step: int) -> Iterator[Callable[[], None]]:
        """Yield functions which together write changed rows and remove evicted IDs. Call them in order.

        Args:
            ids: IDs with changed rows, int64 [U], ascending.
            rows: new rows of these IDs, quantized if the table is quantized.
            step: maximum number of rows in ``weight`` which one function writes. The function that adds IDs
                writes all their rows at once.
        """
        seed = self._formula["seed"]
        # Evictions come first, so that added IDs can use the freed rows.
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
        """Yield functions which write ``rows`` to ``target[indices]``, up to ``step`` rows each."""
        for part, values in zip(indices.split(step), rows.split(step), strict=True):
            yield lambda part=part, values=values: target.index_copy_(0, part, values)  # type: ignore[misc]

    def _remove(self, keys: Tensor) -> None:
        """Remove keys from ``added``, and free their rows. Absent keys are ignored."""
        added = self._weights[f"{self._prefix}added"]
        stays = ~torch.isin(added[0], keys)
        self._free += added[1][~stays].tolist()
        self._weights[f"{self._prefix}added"] = added[:, stays].contiguous()

    def _add_rows(self, keys: Tensor, rows: Tensor) -> None:
        """Write the rows of IDs which the table did not have at export.

        An ID that an earlier delta has added keeps its row. A new ID gets a row which an eviction has freed,
        or else a row at the end of ``added_rows``.
        """
        if len(keys) == 0:
            return
        added = self._weights[f"{self._prefix}added"]
        # Keys that an earlier delta added keep their row.
        positions, is_here = self._positions(added[0], keys)
        slots = torch.empty_like(keys)
        slots[is_here] = added[1][positions[is_here]]
        num_new = int((~is_here).sum())
        if self._growing_rows is None:
            row = self._weights[f"{self._prefix}added_rows"].new_zeros(1, rows.shape[1])
            self._growing_rows = GrowingRows([row], max_rows=self.max_rows, name=f"weight {self._name!r}")
        first = self._growing_rows.num_rows
        num_reused = min(num_new, len(self._free))
        self._growing_rows.grow(first + num_new - num_reused)  # may fail, so do it before taking free rows
        # The smallest free index is used first.
        self._free.sort(reverse=True)
        reused = [self._free.pop() for _ in range(num_reused)]
        slots[~is_here] = torch.tensor(
            [*reused, *range(first, self._growing_rows.num_rows)], dtype=torch.int64
        )
        self._growing_rows.tensors[0].index_copy_(0, slots, rows)
        both = torch.cat([added, torch.stack([keys, slots])[:, ~is_here]], 1)
        self._weights[f"{self._prefix}added"] = both[:, both[0].argsort()].contiguous()
        # Lookups read the tensor by name, so they see the added rows from here on.
        self._weights[f"{self._prefix}added_rows"] = self._growing_rows.tensors[0]

    def _initial_rows(self, ids: Tensor) -> Tensor:
        """Return the rows with which training initializes these IDs, quantized if the table is quantized."""
        f = self._formula
        values = uniform_rows(ids, seed=f["first_seed"], low=f["low"], high=f["high"], columns=(0, f["dim"]))
        return nbit.quantize(values, self._bits) if self._bits else values.to(self._weights[self._name].dtype)

    def _packaged(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Look up keys among the rows which the table had at export.

        Returns:
            For every key, the row index in ``weight``, int64, or -1 for an absent key; and a bool mask of
            present keys.
        """
        rows = find_rows(self._weights[f"{self._prefix}buckets"], len(self._weights[self._name]), keys)
        return rows, rows >= 0

    @staticmethod
    def _positions(ascending: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Search for ``keys`` in a sorted vector.

        Returns:
            For every key, the index in ``ascending``, int64, and a bool mask of present keys. The index of an
            absent key has no meaning.
        """
        if len(ascending) == 0:
            return torch.zeros_like(keys), torch.zeros(len(keys), dtype=torch.bool)
        positions = torch.searchsorted(ascending, keys).clamp_(max=len(ascending) - 1)
        return positions, ascending[positions] == keys
