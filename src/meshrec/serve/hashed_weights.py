"""The hashed tables of a package while deltas change them.

[Note: a hashed table that is served]

Rows of IDs that the package has are written where they are, in pages of this worker's own. An ID that was
evicted gets its first row there: that is what it reads. IDs that the package lacks have their rows in
``added_rows``; ``added`` has their keys, ascending, and the row of each. An evicted one leaves both.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from meshrec.ops import nbit
from meshrec.ops.first_rows import uniform_rows
from meshrec.ops.index import mix
from meshrec.ops.keyed import rows_of
from meshrec.tables.growing import GrowingRows

# n rows of the package, m rows added to them, U rows of a delta


class HashedWeights:
    """The rows of one hashed table in a package's weights.

    Args:
        weights: the package's weights by name. The table's own are changed in place, or replaced.
        name: the name of the table's rows.
        formula: what the manifest says of the table's keys and first rows.
        bits: bits per code of quantised rows; 0 for floating-point rows.
    """

    def __init__(
        self, weights: MutableMapping[str, Tensor], name: str, formula: Mapping[str, Any], bits: int
    ) -> None:
        self._weights, self._name, self._formula, self._bits = weights, name, formula, bits
        self._prefix = name.removesuffix("weight")
        self._grown: GrowingRows | None = None
        self._free: list[int] = []

    @property
    def max_rows(self) -> int:
        """The number of rows that the table may have at once."""
        return int(self._formula["max_rows"])

    def portions(self, ids: Tensor, rows: Tensor, gone: Tensor, step: int) -> Iterator[Callable[[], None]]:
        """Yield functions that together put changed rows in place and take evicted IDs out.

        Args:
            ids: int64 [U], ascending.
            rows: their rows, as the table has them.
            gone: the evicted IDs, int64, none of them in ``ids``.
            step: the most rows that a function writes in place.
        """
        seed = self._formula["seed"]
        left, keys = mix(gone, seed), mix(ids, seed)
        place, is_here = self._packaged(left)
        first = self._first_rows(gone[is_here])
        yield from self._written(self._weights[self._name], place[is_here], first, step)
        yield lambda: self._forget(left[~is_here])
        place, is_here = self._packaged(keys)
        yield from self._written(self._weights[self._name], place[is_here], rows[is_here], step)
        keys, order = keys[~is_here].sort()
        yield lambda: self._add(keys, rows[~is_here][order])

    def _written(
        self, target: Tensor, places: Tensor, rows: Tensor, step: int
    ) -> Iterator[Callable[[], None]]:
        for some, values in zip(places.split(step), rows.split(step), strict=True):
            yield lambda some=some, values=values: target.index_copy_(0, some, values)  # type: ignore[misc]

    def _forget(self, keys: Tensor) -> None:
        added = self._weights[f"{self._prefix}added"]
        stays = ~torch.isin(added[0], keys)
        self._free += added[1][~stays].tolist()
        self._weights[f"{self._prefix}added"] = added[:, stays].contiguous()

    def _add(self, keys: Tensor, rows: Tensor) -> None:
        """Write the rows of keys that the package lacks; those that are not there yet get free ones."""
        if len(keys) == 0:
            return
        added = self._weights[f"{self._prefix}added"]
        place, is_here = self._places(added[0], keys)
        slots = torch.empty_like(keys)
        slots[is_here] = added[1][place[is_here]]
        num_new = int((~is_here).sum())
        if self._grown is None:
            row = self._weights[f"{self._prefix}added_rows"].new_zeros(1, rows.shape[1])
            self._grown = GrowingRows([row], max_rows=self.max_rows, name=f"weight {self._name!r}")
        first = self._grown.num_rows
        self._free.sort(reverse=True)
        chosen = [self._free.pop() for _ in range(min(num_new, len(self._free)))]
        self._grown.grow(first + num_new - len(chosen))
        slots[~is_here] = torch.tensor([*chosen, *range(first, self._grown.num_rows)], dtype=torch.int64)
        self._grown.tensors[0].index_copy_(0, slots, rows)
        both = torch.cat([added, torch.stack([keys, slots])[:, ~is_here]], 1)
        self._weights[f"{self._prefix}added"] = both[:, both[0].argsort()].contiguous()
        self._weights[f"{self._prefix}added_rows"] = self._grown.tensors[0]

    def _first_rows(self, ids: Tensor) -> Tensor:
        f = self._formula
        numbers = uniform_rows(ids, seed=f["first_seed"], low=f["low"], high=f["high"], columns=(0, f["dim"]))
        return (
            nbit.quantize(numbers, self._bits) if self._bits else numbers.to(self._weights[self._name].dtype)
        )

    def _packaged(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row of each key in the package, and whether it has one."""
        rows = rows_of(self._weights[f"{self._prefix}buckets"], len(self._weights[self._name]), keys)
        return rows, rows >= 0

    @staticmethod
    def _places(known: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the position of each key among ascending ones, and whether it is there."""
        if len(known) == 0:
            return torch.zeros_like(keys), torch.zeros(len(keys), dtype=torch.bool)
        place = torch.searchsorted(known, keys).clamp_(max=len(known) - 1)
        return place, known[place] == keys
