"""Collect the planner's input from a model: its tables, and lookup statistics measured on sample batches."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from meshrec.comms.wire import FULL_PRECISION, TableWires, WireFormats
from meshrec.ops.index import BYTES_PER_ID
from meshrec.ops.nbit import row_bytes
from meshrec.optim import OptimizerSpec, in_backward_spec
from meshrec.optim.table_names import by_full_name, by_module, full_names
from meshrec.planner.types import OptimizerKind, ParameterConstraints, Table


def optimizer_kind(spec: OptimizerSpec | None) -> OptimizerKind:
    """Return the fused optimizer kind which a spec describes; ``NONE`` without a spec."""
    return OptimizerKind.NONE if spec is None else spec.formula.kind


class EmbeddingModule(NamedTuple):
    """Embedding module in a model.

    Attributes:
        path: module path, as in ``model.named_modules()``.
        module: the embedding module.
        sharder: first sharder that supports the module; None if no sharders were given.
    """

    path: str
    module: Any
    sharder: Any


def embedding_modules(model: nn.Module, sharders: Sequence[Any] | None = None) -> Iterator[EmbeddingModule]:
    """Yield the embedding modules which a sharder supports, or all if `sharders` is None."""
    for path, module in model.named_modules():
        if _configs(module) is None:
            continue
        if sharders is None:
            yield EmbeddingModule(path, module, None)
        for sharder in sharders or ():
            if isinstance(module, sharder.module_type):
                yield EmbeddingModule(path, module, sharder)
                # Only the first sharder that supports the module counts.
                break


def tables_of_model(
    model: nn.Module,
    sharders: Sequence[Any] | None = None,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    *,
    default_optimizer: OptimizerKind = OptimizerKind.NONE,
    default_wire: WireFormats | TableWires = FULL_PRECISION,
) -> list[Table]:
    """Describe a model's tables for the planner.

    A table's optimizer is the optimizer attached to the weight, otherwise the sharder's, otherwise
    `default_optimizer`. The wire formats are the sharder's, otherwise `default_wire`. If several modules use
    the same table name, the names become ``path.name``, here and in `constraints`.

    Args:
        model: model with embedding modules.
        sharders: only modules supported by one of these are included; None: all embedding modules.
        constraints: constraints and lookup statistics by table name.
        default_optimizer: fused optimizer for tables that have none otherwise.
        default_wire: wire formats for tables whose sharder sets none.

    Raises:
        ValueError: a constraint or wire format is for an unknown or ambiguous table name.
    """
    names_by_path = tables_by_path(model, sharders)
    names = full_names(names_by_path)
    # By full name, because several modules may use the same table name.
    constraints = by_full_name(constraints or {}, names_by_path, "constraints name")
    default_wires = default_wire if isinstance(default_wire, TableWires) else TableWires(default_wire)
    given = by_full_name(default_wires.tables, names_by_path, "wire formats name")
    default_wires = default_wires._replace(tables=given)
    tables = []
    for path, module, sharder in embedding_modules(model, sharders):
        # Only some sharders have an optimizer.
        default = optimizer_kind(getattr(sharder, "optimizer", None))
        if default is OptimizerKind.NONE:
            default = default_optimizer
        wires = _wires_of(sharder, path, names_by_path)
        # Parameters are named <collection>.<table>.weight.
        weights = {name.split(".")[-2]: weight for name, weight in module.named_parameters() if "." in name}
        for config in _configs(module) or ():
            weight = weights.get(config.name)
            spec = None if weight is None else in_backward_spec(weight)
            name = names[path, config.name]
            table = table_of_config(
                config,
                constraints.get(name, ParameterConstraints()),
                pooled=hasattr(module, "embedding_bag_configs"),
                weighted=bool(getattr(module, "is_weighted", lambda: False)()),
                weight_bytes=_weight_bytes(config, weight),
                optimizer=default if spec is None else optimizer_kind(spec),
                module_path=path,
                wire=default_wires.for_table(name) if wires is None else wires.for_table(config.name),
            )
            tables.append(replace(table, name=name))
    return tables


def _wires_of(sharder: Any, path: str, names_by_path: Mapping[str, Sequence[str]]) -> TableWires | None:
    """Return the wire formats which a sharder sets for a module's tables; None if it sets none."""
    wires: TableWires | None = getattr(sharder, "wires", None)
    if wires is None:
        return None
    return wires._replace(
        tables=by_module(wires.tables, names_by_path, "the sharder's precision names")[path]
    )


def tables_by_path(model: nn.Module, sharders: Sequence[Any] | None = None) -> dict[str, list[str]]:
    """Return the table names of every embedding module, by module path."""
    return {
        path: [config.name for config in _configs(module) or ()]
        for path, module, _ in embedding_modules(model, sharders)
    }


def table_of_config(
    config: Any,
    constraints: ParameterConstraints,
    *,
    pooled: bool,
    weighted: bool = False,
    weight_bytes: float = 4,
    optimizer: OptimizerKind = OptimizerKind.NONE,
    module_path: str = "",
    wire: WireFormats = FULL_PRECISION,
) -> Table:
    """Describe a table for the planner.

    Args:
        config: the table's config in the embedding module, such as an ``EmbeddingBagConfig``.

    Raises:
        ValueError: the constraints have another number of features than the config.
    """
    num_features = len(config.feature_names)
    pooling = tuple(float(factor) for factor in constraints.pooling_factors or (1.0,) * num_features)
    if len(pooling) != num_features:
        raise ValueError(
            f"table {config.name!r}: {len(pooling)} pooling_factors for the {num_features} features "
            f"{list(config.feature_names)}; give one per feature."
        )
    batch_sizes, bits = constraints.batch_sizes, _bits(config)
    if batch_sizes and len(batch_sizes) != num_features:
        raise ValueError(
            f"table {config.name!r}: {len(batch_sizes)} batch_sizes for the {num_features} features "
            f"{list(config.feature_names)}; give one per feature."
        )
    table = Table(
        name=config.name,
        num_embeddings=config.num_embeddings,
        embedding_dim=config.embedding_dim,
        pooling_factors=pooling,
        num_poolings=None if constraints.num_poolings is None else tuple(constraints.num_poolings),
        weight_bytes=weight_bytes,
        # Bytes for scale and bias, which a quantized row has in addition to its values.
        row_bytes=row_bytes(config.embedding_dim, bits) - config.embedding_dim * bits / 8 if bits else 0,
        index_bytes=_index_bytes(config),
        trained=not bits,
        pooled=pooled,
        weighted=weighted,
        optimizer=optimizer,
        effective_rows=constraints.effective_rows,
        # The cost model has one batch size per table, so features with other sizes are averaged.
        batch_size=None if not batch_sizes else round(sum(batch_sizes) / len(batch_sizes)),
        module_path=module_path,
        wire=wire,
    )
    return replace(table, in_memory=_in_memory(config, table))


def _in_memory(config: Any, table: Table) -> float:
    """Return the fraction of a table's bytes that is in memory.

    The result is 1 for a table without a file. For a table in a file, memory has the cached rows and, if the
    table is hashed, the whole index.
    """
    storage = getattr(config, "storage", None)
    if storage is None:
        return 1.0
    whole = table.num_bytes / table.num_embeddings
    cached: int = storage.num_cached(int(whole - table.index_bytes))
    share = min(1.0, cached / table.num_embeddings)
    # Rows on disk still have their index entry in memory.
    return share + (1 - share) * table.index_bytes / whole


def _bits(config: Any) -> int:
    """Return the bits per quantized weight; 0 for a table with floating-point weights."""
    return getattr(getattr(config, "data_type", None), "bits", 0)


def _index_bytes(config: Any) -> float:
    """Return the bytes per row for index, eviction and admission in a hashed table; 0 for other tables."""
    keys = getattr(config, "keys", None)
    if keys is None:
        return 0
    policy: int = sum(part.dtype.itemsize for part in getattr(keys.evict, "parts", ()))
    sketch: float = getattr(keys.admit, "bytes", 0) / config.num_embeddings
    return BYTES_PER_ID + policy + sketch


def _weight_bytes(config: Any, weight: torch.Tensor | None) -> float:
    """Return the bytes per weight, below 1 if a quantized weight has fewer than 8 bits.

    fp32 is assumed if the table is not quantized and `weight` is None.
    """
    if bits := _bits(config):
        return bits / 8
    return torch.float32.itemsize if weight is None else weight.element_size()


def estimate_from_batches(model: nn.Module, batches: Iterable[Any]) -> dict[str, ParameterConstraints]:
    """Measure pooling factors and skew per table on sample batches.

    Merge the result into your own constraints with `dataclasses.replace`.

    Args:
        model: model with embedding modules.
        batches: `KeyedJaggedTensor` batches with all features of the model.

    Returns:
        Constraints with ``pooling_factors`` and ``effective_rows`` (see `Table`), by table name, or by
        ``path.name`` if several modules use the name.

    Raises:
        ValueError: the batches lack a feature of the model.
    """
    # Totals over all batches, by feature.
    num_ids: dict[str, int] = {}
    num_bags: dict[str, int] = {}
    # All IDs of the sample are kept, because distinct IDs do not add up over batches.
    seen: dict[str, list[torch.Tensor]] = {}
    for batch in batches:
        for key, jagged in batch.to_dict().items():
            num_ids[key] = num_ids.get(key, 0) + jagged.values().numel()
            num_bags[key] = num_bags.get(key, 0) + jagged.lengths().numel()
            seen.setdefault(key, []).append(jagged.values())
    by_table, names = {}, full_names(tables_by_path(model))
    for path, module, _ in embedding_modules(model):
        for config in _configs(module) or ():
            if missing := [name for name in config.feature_names if not num_bags.get(name)]:
                raise ValueError(
                    f"table {config.name!r}: the batches have no feature {missing[0]!r}; they have "
                    f"{list(num_bags)}."
                )
            pooling = tuple(num_ids[name] / num_bags[name] for name in config.feature_names)
            ids = torch.cat([values for name in config.feature_names for values in seen[name]])
            rows = _effective_rows(ids.numel(), torch.unique(ids).numel(), config.num_embeddings)
            by_table[names[path, config.name]] = ParameterConstraints(
                pooling_factors=pooling, effective_rows=rows
            )
    return by_table


def _effective_rows(draws: int, distinct: int, rows: int) -> float:
    """Return a measure of skew: the count of equally likely rows that would explain the lookups.

    If lookups were uniform over this many rows, `draws` lookups would touch `distinct` rows on average.
    """
    # Without a repeated ID, the sample shows no skew.
    if draws == 0 or distinct >= draws:
        return float(rows)
    low, high = float(distinct), float(rows)
    # Even uniform lookups repeat this often.
    if _expected_distinct(high, draws) <= distinct:
        return high
    # The expected count grows with the row count, so bisect. 60 halvings exceed the precision of a float.
    for _ in range(60):
        middle = (low + high) / 2
        if _expected_distinct(middle, draws) < distinct:
            low = middle
        else:
            high = middle
    return high


def _expected_distinct(rows: float, draws: int) -> float:
    """Return the expected number of distinct rows in `draws` draws from equally likely rows."""
    return rows * (1 - float(torch.exp(torch.tensor(-draws / rows, dtype=torch.float64))))


def _configs(module: nn.Module) -> Sequence[Any] | None:
    """Return the table configs in an embedding module; None for any other module."""
    for name in ("embedding_bag_configs", "embedding_configs"):
        method = getattr(module, name, None)
        if callable(method):
            configs: Sequence[Any] = method()
            return configs
    return None
