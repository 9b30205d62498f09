"""Module holding the rows of a single table: the whole table or this rank's shard, in any storage."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from typing_extensions import Self

from meshrec.optim.optimizers import OptimizerSpec, StateSlot
from meshrec.tables.dense.table import FixedTable
from meshrec.tables.hashed.io import (
    key_ordered_parts,
    load_full_table,
    merge_by_key,
    shows_current_rows,
    state_dict_names,
)
from meshrec.tables.hashed.keys import ALL_KEYS
from meshrec.tables.hashed.table import is_growable
from meshrec.tables.local_shards import LocalShard
from meshrec.tables.packing import Packing
from meshrec.tables.placeholder import placeholder
from meshrec.tables.storage import RowStorage, check_loadable, slice_parts
from meshrec.tables.streamed import is_same_data
from meshrec.tables.table import Rectangle, RowBlock, Table


class TableSplit(Protocol):
    """Interface through which a table's state dict learns how the table is split among ranks."""

    @property
    def is_split(self) -> bool:
        """Whether a rank may hold only a part of the table."""

    def full_parts(self, module: "TableModule") -> dict[str, Tensor]:
        """Return the whole-table row parts by name, as split tensors that refer to the local rows."""

    def full_state(self, module: "TableModule", slot: StateSlot) -> Tensor:
        """Return the whole-table optimizer state, fp32, as a split tensor that refers to local memory."""

    def any_rank(self, condition: bool) -> bool:
        """Return whether a condition holds on any rank. Collective if the table is split."""

    def rows_loaded(self) -> None:
        """Tell all ranks that the rows of a growable table were replaced. Collective."""


class TableModule(nn.Module):
    """Module holding the rows of an embedding table in this process.

    The state dict describes the whole table, whatever parameters hold the rows. Its entries are the row
    parts: ``weight``, scales and biases of quantised rows, and IDs in hashed tables. For a table split over
    ranks the entries are ``SplitTensor`` objects, which torch.distributed.checkpoint saves, and loads in
    place under any plan; ``full_tensor()`` returns the whole tensor. For a table in a single process they are
    plain tensors, or tensors that read their values on demand. Loading a state dict copies all parts or none.

    Args:
        name: table name.
        size: number of rows (for a hashed table: the limit) and number of columns.
        storage: row format and location.
        weight: the parameter ``weight``: a whole table, or this rank's rectangles. None if ``shards`` are on
            several devices; the parameters are then ``part0``, ``part1``, ...
        tables: the table object of an unsharded hashed table; None for other tables.
        shards: this process's shards of a sharded table, one per device; None for an unsharded table.
        split: the ranks among which the table is split; None if this process has the whole table.
    """

    def __init__(
        self,
        name: str,
        size: tuple[int, int],
        storage: RowStorage,
        weight: nn.Parameter | None,
        *,
        tables: Sequence[Table] | None = None,
        shards: Sequence[LocalShard] | None = None,
        split: TableSplit | None = None,
    ) -> None:
        super().__init__()
        # ``use_storage`` may replace the storage. Name and size are fixed.
        self.name, (self.num_rows, self.dim), self.storage = name, size, storage
        # Fixed for the module's life. Resharding builds new table modules.
        self.local_shards = list(shards or ())
        self.split = split
        self.is_sharded = shards is not None
        """Whether the table is sharded. Its rows then keep their device and dtype."""
        if self.is_sharded:
            tables = [table for shard in self.local_shards for table in shard.tables]
        # None: an unsharded fixed table, for which ``tables`` creates an object per call.
        self._tables = None if tables is None else list(tables)
        self.over_devices = weight is None
        """Whether the rectangles lie on several devices in this process, for inference."""
        if weight is not None:
            self.weight = weight
        else:
            for number, shard in enumerate(self.local_shards):
                self.register_parameter(f"part{number}", shard.parameter)
        # State dicts show the whole table, whatever parameters store it.
        self.register_state_dict_post_hook(_save_full_parts)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_load_full_parts)  # type: ignore[no-untyped-call]

    @classmethod
    def hashed(cls, storage: Any, device: torch.device | None) -> Self:
        """Create a module for an unsharded hashed table, which has no rows at first.

        Args:
            storage: table description, a ``HashedRows``.
            device: device of the placeholder parameter; may be ``meta``.
        """
        rows = storage.allocate(0, storage.columns(storage.dim), device)
        weight = placeholder(rows, storage.name, storage.is_trainable)
        table = storage.table(_all_rows(storage.dim), None, None)
        return cls(storage.name, (storage.max_rows, storage.dim), storage, weight, tables=[table])

    @property
    def is_growable(self) -> bool:
        """Whether rows are added and removed during training, as in hashed tables."""
        return self.storage.is_growable

    @property
    def is_split(self) -> bool:
        """Whether this rank may hold only a part of the table."""
        return self.split is not None and self.split.is_split

    @property
    def tables(self) -> Sequence[Any]:
        """``Table`` objects in this process, one per rectangle."""
        if self._tables is not None:
            return self._tables
        # Created per call: conversions and quantisation replace the parameter, which may be a buffer.
        weight = self._parameters.get("weight")
        weight = weight if weight is not None else nn.Parameter(self.weight, requires_grad=False)
        packing = Packing([Rectangle(0, 0, len(weight), 0, self.dim)], self.storage)
        return [FixedTable(weight, packing, 0, [], None)]

    @property
    def rectangles(self) -> list[Rectangle]:
        """The rectangles held by this process: row and column intervals of the table."""
        return [table.rectangle for table in self.tables]

    def shards(self) -> list[Tensor]:
        """Return the row memory per rectangle: ``weight`` itself, or views into it if it holds several."""
        return [table.rows for table in self.tables]

    # ---- unsharded hashed tables ------------------------------------------------------------------

    def train_with(self, spec: OptimizerSpec | None) -> Any:
        """Replace an unsharded hashed table by a table with the same rows for an optimizer, and return it.

        Optimizer state with the same names is copied. Other state gets initial values.

        Args:
            spec: fused optimizer, which tells the state per row; None: no optimizer state.
        """
        # An unsharded hashed table is a single rectangle.
        (before,) = self.tables
        table = self.storage.table(_all_rows(self.dim), spec, None)  # type: ignore[attr-defined]
        table.load(before.stream())
        self._tables = [table]
        return table

    def share(self, table: Table) -> None:
        """Replace this module's hashed table by another module's table, without a copy.

        Moves the placeholder parameter to the CPU. This module does not train the table.

        Args:
            table: the other module's table.
        """
        self.to_empty(device="cpu")
        self._tables = [table]
        self.weight.requires_grad_(False)

    def use_storage(self, storage: RowStorage) -> None:
        """Replace an unsharded hashed table's options. Its rows stay.

        Args:
            storage: options with the same row format.
        """
        self.storage = self.tables[0].storage = storage

    def reset_parameters(self) -> None:
        """Remove all rows from a hashed table, or set the rows of a fixed table to zero.

        Called for quantised fixed tables, which have no random initial values.
        """
        if self.is_growable:
            self.tables[0].clear()
        else:
            self.weight.data.zero_()

    # ---- state dicts ------------------------------------------------------------------------------

    def part_names(self) -> list[str]:
        """Return the names of the row parts in the state dict, such as ``weight``."""
        if is_growable(self.storage):
            return state_dict_names(self.storage)
        return [part.name for part in self.storage.row_parts]

    def full_parts(self) -> dict[str, Tensor]:
        """Return the whole-table row parts by name, as in the state dict.

        They refer to the table's memory, except if the rectangles lie on several devices. Then they are
        copies.
        """
        if self.split is not None:
            return self.split.full_parts(self)
        if self.over_devices:
            if is_growable(self.storage):
                return merge_by_key(self.tables, self.storage)
            return self._copied_parts()
        if self.is_growable:
            return key_ordered_parts(self.tables[0])
        tensors = self.tables[0].tensors()
        return {name: tensors[name] for name in self.part_names()}

    def full_state(self, slot: StateSlot) -> Tensor:
        """Return the whole-table optimizer state in one slot, fp32 for any row dtype, without a copy.

        Args:
            slot: state slot to return.
        """
        if self.split is not None:
            return self.split.full_state(self, slot)
        # Not detached: pickle deduplicates the same tensor object, but not two tensors sharing memory.
        state: Tensor = self.tables[0].tensors()[slot.name]
        return state

    def load(self, values: Mapping[str, Tensor], prefix: str) -> None:
        """Load row parts from a state dict into the local rows.

        The values are whole-table tensors, or split tensors from the same plan. If a part does not fit,
        nothing is copied. Collective for growable tables.

        Args:
            values: row parts by name.
            prefix: prefix for part names in messages.

        Raises:
            ValueError: a part is missing, has another size or dtype, or holds other rectangles.
        """
        if self.is_growable:
            self._load_hashed(values, prefix)
            return
        check_loadable(values["weight"], prefix + "weight", self.storage)
        full = self._empty_parts() if self.over_devices else self.full_parts()
        for name, part in full.items():
            value = values.get(name)
            if value is None:
                raise ValueError(
                    f"{prefix}{name} is missing. Load what the quantised model's state_dict gave."
                )
            if value.shape != part.shape:
                raise ValueError(
                    f"{prefix}{name}: the state dict has shape {list(value.shape)}, the table "
                    f"{list(part.shape)}. Load it into a model with the same tables, quantised alike."
                )
        # Validate everything before the first write.
        pairs: list[tuple[Tensor, Tensor]] = []
        for name, part in full.items():
            try:
                pairs += _copy_pairs(part, values[name])
            except Exception as error:
                error.args = (f"{prefix}{name}: {error}",)
                raise
        with torch.no_grad():
            for part, value in pairs:
                if not is_same_data(part, value):
                    part.detach().copy_(value)
        if self.over_devices:
            for table in self.tables:
                _, r0, r1, c0, c1 = table.rectangle
                parts = slice_parts(self.storage, full, slice(r0, r1), (c0, c1))
                table.load([RowBlock(range(r0, r1), (c0, c1), parts)])
        elif not self.storage.rows_in_parameter:
            # The rows are outside the parameter, so torch has counted no write. Count it here: the backward
            # pass of a batch in flight must notice the change.
            increment_version(self.weight)

    def rows_loaded(self) -> None:
        """Tell batches in flight, and all ranks, that rows were replaced. Collective for growable tables."""
        if not self.over_devices:
            increment_version(self.weight)
        if self.split is not None:
            self.split.rows_loaded()

    def _load_hashed(self, values: Mapping[str, Tensor], prefix: str) -> None:
        """Load row parts from a state dict into a hashed table; see ``load``."""
        # If the values are this table's present rows, there is nothing to do. All ranks must skip together,
        # because ``rows_loaded`` is collective.
        is_other = self.over_devices or not shows_current_rows(values, self.tables)
        if self.split is not None:
            is_other = self.split.any_rank(is_other)
        if is_other:
            try:
                load_full_table(self.tables, values, prefix)
            finally:
                # On every rank, even if loading failed on this one: the other ranks wait in the collective.
                self.rows_loaded()

    def _empty_parts(self) -> dict[str, Tensor]:
        """Create row parts for the whole table on the CPU, filled with zeros. Return them by name."""
        rows = self.storage.allocate(self.num_rows, self.storage.columns(self.dim), torch.device("cpu"))
        return dict(zip(self.part_names(), self.storage.parts(rows.zero_(), self.dim), strict=True))

    def _copied_parts(self) -> dict[str, Tensor]:
        """Return the row parts of a fixed table, copied from several devices to the CPU, by name."""
        full = self._empty_parts()
        for table in self.tables:
            for block in table.stream():
                rows = slice(block.keys.start, block.keys.stop)
                for name, target in slice_parts(self.storage, full, rows, block.columns).items():
                    target.copy_(block.parts[name])
        return full

    # ---- torch ------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if self.is_sharded and not self.over_devices:
            # The optimizer state and the plan assume the present dtype and device. Try ``fn`` on an empty
            # tensor to see whether it changes them.
            before = torch.empty(0, dtype=self.weight.dtype, device=self.weight.device)
            after = fn(before)
            if (after.dtype, after.device) != (before.dtype, before.device):
                raise ValueError(
                    f"table {self.name!r} is sharded, and cannot be moved or cast from {before.dtype} on "
                    f"{before.device} to {after.dtype} on {after.device}. Choose data_type in its "
                    "configuration, and the device when you shard the model."
                )
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def extra_repr(self) -> str:
        if self.is_sharded:
            parts = [f"[{r.r0}:{r.r1}, {r.c0}:{r.c1}]" for r in self.rectangles]
            return f"{' '.join(parts) or 'nothing'} of {self.num_rows} x {self.dim}"
        if self.is_growable:
            return f"{self.tables[0].num_alive} of at most {self.num_rows}, {self.dim}, hashed"
        return f"{self.weight.shape[0]}, {self.dim}, bits={self.storage.bits}"


def _all_rows(dim: int) -> Rectangle:
    """Return the rectangle of a whole hashed table with ``dim`` columns: all keys and all columns."""
    return Rectangle(0, *ALL_KEYS, 0, dim)


def _copy_pairs(full: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of local memory and the new values to copy there.

    Raises:
        ValueError: the value has other rectangles than this rank.
    """
    # A SplitTensor has ``local``; the class is slow to import.
    local: Any = getattr(full, "local", None)
    if local is not None and hasattr(value, "local"):
        value = value.local
    elif hasattr(value, "full_tensor"):
        value = value.full_tensor()
    if local is None:
        return [(full, value)]
    return list(zip(local.local_shards(), local.parts_of(value), strict=True))


def _save_full_parts(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object
) -> None:
    """Replace a module's parameters in its state dict by the whole-table row parts.

    Registered as a state dict post-hook; torch passes the arguments.
    """
    assert isinstance(module, TableModule)
    # Remove torch's own entries (placeholders, parts) before the whole parts replace them.
    for name in module._parameters:
        del state_dict[prefix + name]
    state_dict.update({prefix + name: part for name, part in module.full_parts().items()})


def _load_full_parts(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: object,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Load the whole-table row parts from a state dict, before torch loads the module's parameters.

    Registered as a load pre-hook; torch passes the arguments.
    """
    assert isinstance(module, TableModule)
    names = module.part_names()
    values = {name: state_dict.pop(prefix + name) for name in names if prefix + name in state_dict}
    # torch then loads parameters and buffers from their present values; the table's rows are loaded here.
    present = chain(module.named_parameters(), module.named_buffers())
    state_dict.update(
        {
            prefix + name: data.detach()
            for name, data in present
            if name not in module._non_persistent_buffers_set
        }
    )
    if "weight" not in values:
        if strict:
            missing_keys.append(prefix + "weight")
        return
    try:
        module.load(values, prefix)
    except Exception as error:
        # Do not raise here. torch raises the collected messages after it has loaded all modules, so this rank
        # takes part in the collectives of later tables.
        error_msgs.append(str(error))
