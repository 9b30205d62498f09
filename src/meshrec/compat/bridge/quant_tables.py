"""Quantized rows under FBGEMM's names: table groups with raw byte access."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshrec.compat.bridge.sharded_traces import parts_of
from meshrec.distributed.build import ModuleParts
from meshrec.modules.embedding_configs import DataType

Rows = tuple[Tensor, Tensor | None]
"""Rows with inline scales and biases, uint8 [rows, bytes], and None for separate scales."""


class TableSpec(NamedTuple):
    """Name, size and data type of a table in a `QuantTableGroup`."""

    name: str
    num_embeddings: int
    embedding_dim: int
    data_type: DataType


class QuantTableGroup:
    """Quantized tables with the same pooling type, and access to their rows on this rank.

    The group replaces TorchRec's batched kernel object (TBE, table batched embedding).

    Args:
        built: parts of the sharded module with these tables; None if the module is not sharded.
    """

    def __init__(
        self, specs: Sequence[TableSpec], parts: Sequence[Sequence[Tensor]], built: ModuleParts | None = None
    ) -> None:
        self.embedding_specs = list(specs)
        self._parts = [list(views) for views in parts]
        self._built = built

    def split_embedding_weights(self) -> list[Rows]:
        """Return this rank's rows of every table.

        Returns:
            A pair per table. The first element has the rows, as a view, or as a copy if the table has several
            local shards. The second element is None, because the rows contain their scales.
        """
        return [(views[0] if len(views) == 1 else torch.cat(views), None) for views in self._parts]

    def assign_embedding_weights(self, weights: Sequence[Rows]) -> None:
        """Overwrite the rows of all tables. Validates every table before writing any.

        Raises:
            ValueError: rows have the wrong shape, or separate scales.
        """
        for spec, (rows, scales), views in zip(self.embedding_specs, weights, self._parts, strict=True):
            shape = (sum(len(view) for view in views), views[0].shape[1])
            if scales is not None or tuple(rows.shape) != shape:
                raise ValueError(
                    f"table {spec.name!r} takes rows of shape {list(shape)} with their scales inside, got "
                    f"{list(rows.shape)}{'' if scales is None else ' and scales apart'}. Take the rows of a "
                    "model quantised in the same way."
                )
        # All tables are valid: write.
        for (rows, _), views in zip(weights, self._parts, strict=True):
            for view, shard_rows in zip(views, rows.split([len(view) for view in views]), strict=True):
                view.copy_(shard_rows)
        if self._built is not None:
            self._built.tables.num_changes += 1  # rows that were looked up ahead are outdated


def table_groups(module: Any) -> list[QuantTableGroup]:
    """Group a quantized collection's tables by pooling type. The collection may be sharded.

    Raises:
        ValueError: a table is split by columns.
    """
    # Only a sharded collection has this attribute, with the shards of this rank.
    built = getattr(module, "built", None)
    bags = getattr(module, "embedding_bag_configs", None)
    configs = module.embedding_configs() if bags is None else bags()
    weights = {} if built is not None else {c.name: weight for c, weight in module.tables().values()}
    groups: dict[object, list[Any]] = {}
    for config in configs:
        groups.setdefault(getattr(config, "pooling", None), []).append(config)
    return [
        QuantTableGroup(
            [TableSpec(c.name, c.num_embeddings, c.embedding_dim, c.data_type) for c in group],
            [[weights[c.name]] if built is None else _views(built, c) for c in group],
            built,
        )
        for group in groups.values()
    ]


def _views(built: ModuleParts, config: Any) -> list[Tensor]:
    """Return views of the rows of this rank's shards of a table, in row order."""
    views = []
    for part in parts_of(built.shards[config.name]):
        rectangle = part.rectangle
        if rectangle.c1 - rectangle.c0 != config.embedding_dim:
            raise ValueError(
                f"table {config.name!r} is split by columns, and each part has scales of its own. Read and "
                "write its rows before the model is sharded."
            )
        rows, width = part.shape
        # The tensor holds all rectangles of this table on a device. This rectangle begins at element `start`.
        weight = part.weight.detach().flatten()
        views.append((rectangle.r0, weight[part.start : part.start + rows * width].view(rows, width)))
    return [rows for _, rows in sorted(views, key=lambda view: view[0])]


def _groups(model: nn.Module) -> Iterator[QuantTableGroup]:
    """Yield the table groups of all quantized collections in a model."""
    for module in model.modules():
        yield from getattr(module, "tbes", [])


def get_table_to_weights_from_tbe(model: nn.Module) -> dict[str, Rows]:
    """Return copies of all quantized rows, by table."""
    return {
        spec.name: (rows.clone(), scales)
        for group in _groups(model)
        for spec, (rows, scales) in zip(group.embedding_specs, group.split_embedding_weights(), strict=True)
    }


def assign_weights_to_tbe(model: nn.Module, table_to_weight: Mapping[str, Rows]) -> None:
    """Overwrite all quantized rows with a result of ``get_table_to_weights_from_tbe``.

    Raises:
        ValueError: a table is missing, or the rows have the wrong shape.
    """
    for group in _groups(model):
        names = [spec.name for spec in group.embedding_specs]
        if missing := [name for name in names if name not in table_to_weight]:
            raise ValueError(
                f"there are no rows for the table {missing[0]!r}; there are some for "
                f"{list(table_to_weight)}. Take them from the same model."
            )
        group.assign_embedding_weights([table_to_weight[name] for name in names])
