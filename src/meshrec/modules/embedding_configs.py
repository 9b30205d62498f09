"""Configuration of embedding tables: size, features, pooling, storage and initialization."""

import enum
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from meshrec.tables.cached.rows import FileRows
from meshrec.tables.dense.rows import row_format
from meshrec.tables.hashed.keys import Hashed

# Attributes of every torch module. A table is a submodule, so the table name must not shadow them.
_TAKEN_NAMES = frozenset(vars(nn.Module()))


class PoolingType(enum.Enum):
    """How the rows for the IDs in a bag are combined. NONE returns a row per ID (sequence embeddings)."""

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


class _DataTypeMeta(enum.EnumMeta):
    """Metaclass of `DataType`. Its error for an unknown member lists the members."""

    def __getattr__(cls, name: str) -> Any:
        # Not by attribute, which would call this method again while the class is built.
        members = vars(cls).get("_member_map_", {})
        if name in members:
            return members[name]
        if name.startswith("_"):
            return super().__getattribute__(name)  # raises the usual AttributeError
        raise AttributeError(_unknown_data_type(name, members))


def _unknown_data_type(name: object, members: Iterable[str]) -> str:
    """Return the error message for an unknown data type."""
    return (
        f"tables have no data type {name}. Choose one of {', '.join(members)}; codes are unsigned, so that "
        "what others call UINT8 is INT8."
    )


class DataType(enum.Enum, metaclass=_DataTypeMeta):
    """Data type of a table's elements, in training or, for quantized tables, in inference."""

    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"
    INT8 = "INT8"
    """Quantized codes of 8 bits (INT4: 4 bits, INT2: 2 bits), for inference only."""
    INT4 = "INT4"
    INT2 = "INT2"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise ValueError(_unknown_data_type(value, cls.__members__))

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype; uint8 for the packed bytes of quantized rows."""
        return {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}.get(
            self.value, torch.uint8
        )

    @property
    def bits(self) -> int:
        """Bits per quantized element; 0 for floating-point types."""
        return {"INT8": 8, "INT4": 4, "INT2": 2}.get(self.value, 0)

    def __str__(self) -> str:
        return self.value


class BoundsCheckMode(enum.Enum):
    """How a lookup handles IDs outside the table, that is, below 0 or at least ``num_embeddings``."""

    ERROR = "error"
    """Raise ValueError before any lookup. The message names table, feature, sample and ID."""
    WARN = "warn"
    """Replace the ID by 0, add it to ``num_clamped_ids``, and log the first occurrence."""
    OFF = "off"
    """Do not check. In an unsharded collection, an invalid ID reads memory outside the table, so validate the
    input elsewhere.
    """


def can_name_table(name: str) -> bool:
    """Return whether ``name`` is valid as a table name, including after export.

    A valid name is not empty, has no dot, and is not an attribute of ``nn.Module`` or ``nn.ModuleDict``:
    torch.export cannot resolve a table named ``keys``.
    """
    return bool(name) and "." not in name and name not in _TAKEN_NAMES and not hasattr(nn.ModuleDict, name)


@dataclass(frozen=True, kw_only=True)
class BaseEmbeddingConfig:
    """Configuration of an embedding table with shape [num_embeddings, embedding_dim].

    Args:
        num_embeddings: Row count. IDs are from 0 to ``num_embeddings - 1``. Leave it out if ``keys`` is
            given; it is then set to the maximum number of rows.
        embedding_dim: Row width D.
        name: Table name, unique in the collection. It is part of the parameter name, so it must not contain
            dots.
        feature_names: Features looked up in this table. Several features may share a table, and a feature may
            read several tables.
        data_type: Data type of the elements.
        weight_init_min: Lower bound for uniform initialization; ``-sqrt(1/num_embeddings)`` if None.
        weight_init_max: Upper bound for uniform initialization; ``sqrt(1/num_embeddings)`` if None.
        init_fn: Function that fills a new weight [num_embeddings, embedding_dim] in place, instead of uniform
            initialization. For hashed tables it is called once per new ID with one row [1, embedding_dim],
            which is slow.
        storage: Where a sharded module stores the rows; None: in memory. See ``FileRows``.
        keys: ``meshrec.Hashed(max_rows=...)`` for a table with arbitrary int64 IDs, whose rows are admitted
            and evicted. Initial rows are a function of (seed, table, ID).
        seed_name: Table name from which the random seed for initial rows is derived; ``name`` if None.
            ``meshrec.fuse`` and ``DistributedModelParallel`` set it to the full path if several modules have
            tables with the same name.

    Raises:
        ValueError: A size is below 1, the name is empty or has a dot, features are missing or repeated, or a
            quantized table has a storage.

    Example::

        >>> config = EmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=8, feature_names=["item"])
        >>> config.init_bounds
        (-0.1, 0.1)
    """

    num_embeddings: int = 0
    embedding_dim: int
    name: str
    feature_names: Sequence[str]
    data_type: DataType = DataType.FP32
    weight_init_min: float | None = None
    weight_init_max: float | None = None
    # Not compared: two configs with equal lambdas must be equal on all ranks.
    init_fn: Callable[[Tensor], object] | None = field(default=None, compare=False)
    storage: FileRows | None = None
    keys: Hashed | None = None
    # Not compared: set after construction, per model.
    seed_name: str | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.storage is not None and (not isinstance(self.storage, FileRows) or self.data_type.bits):
            raise ValueError(
                f"table {self.name!r}: storage={self.storage!r} with data_type {self.data_type}. A storage "
                "is meshrec.FileRows(path=..., cache_rows=...), of a table of FP32, FP16 or BF16."
            )
        if not self.name or "." in self.name:
            raise ValueError(f"a table's name must not be empty nor contain a dot, got {self.name!r}.")
        if self.name in _TAKEN_NAMES:
            raise ValueError(
                f"a table cannot be named {self.name!r}: every torch module has that "
                "attribute. Choose another name."
            )
        if self.keys is not None:
            # The dataclass is frozen; this runs once, during construction.
            object.__setattr__(self, "num_embeddings", self._max_rows(self.keys))
        for size in ("num_embeddings", "embedding_dim"):
            value = getattr(self, size)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"table {self.name!r}: {size} must be an integer >= 1, got {value!r}.")
        if isinstance(self.feature_names, str) or not self.feature_names:
            raise ValueError(
                f"table {self.name!r}: feature_names must be a list with at least one name, "
                f"got {self.feature_names!r}."
            )
        repeated = sorted({f for f in self.feature_names if list(self.feature_names).count(f) > 1})
        if repeated:
            raise ValueError(f"table {self.name!r}: features {repeated} are given twice. Name each once.")

    def _max_rows(self, keys: Hashed) -> int:
        """Return the maximum number of rows of a hashed table."""
        if not isinstance(keys, Hashed):
            raise ValueError(f"table {self.name!r}: keys must be meshrec.Hashed(...) or None, got {keys!r}.")
        if not isinstance(self.embedding_dim, int) or self.embedding_dim < 1:
            return 1  # placeholder: the caller reports the invalid embedding_dim
        try:
            # max_rows may be given in bytes, so the row size must be known here.
            form = row_format(self.data_type.dtype, self.data_type.bits)
            rows = keys.rows(form.num_bytes(1, self.embedding_dim))
        except ValueError as error:
            raise ValueError(f"table {self.name!r}: {error}") from error
        if self.num_embeddings not in (0, rows):
            raise ValueError(
                f"table {self.name!r}: num_embeddings={self.num_embeddings} and keys=Hashed(...) contradict. "
                "Leave num_embeddings out: max_rows says how many rows there may be."
            )
        return rows

    @property
    def init_bounds(self) -> tuple[float, float]:
        """Range [low, high) for the uniform initialization, which is used unless ``init_fn`` is given."""
        bound = math.sqrt(1 / self.num_embeddings)
        low = -bound if self.weight_init_min is None else self.weight_init_min
        return low, bound if self.weight_init_max is None else self.weight_init_max

    def init_weight(self, weight: Tensor) -> None:
        """Initialize ``weight`` [rows, embedding_dim] in place."""
        with torch.no_grad():
            if self.init_fn is not None:
                self.init_fn(weight)
                return
            # Same distribution as TorchRec's default.
            weight.uniform_(*self.init_bounds)


@dataclass(frozen=True, kw_only=True)
class EmbeddingBagConfig(BaseEmbeddingConfig):
    """Configuration of a table whose rows are pooled per bag; ``pooling`` is SUM or MEAN.

    Raises:
        ValueError: As for `BaseEmbeddingConfig`, or pooling is NONE.
    """

    pooling: PoolingType = PoolingType.SUM

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pooling not in (PoolingType.SUM, PoolingType.MEAN):
            raise ValueError(
                f"table {self.name!r}: pooling must be SUM or MEAN, got {self.pooling}. "
                "For rows that are not pooled use EmbeddingConfig and EmbeddingCollection."
            )


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig(BaseEmbeddingConfig):
    """Configuration of a table that returns one row per ID (sequence embeddings)."""


def check_configs(collection: object, tables: object, kind: type[BaseEmbeddingConfig]) -> None:
    """Check the argument ``tables`` in the constructor of a collection.

    Args:
        collection: The collection, which error messages name.
        tables: Argument to check.
        kind: Required class of all elements.

    Raises:
        TypeError: ``tables`` is not a list of ``kind``.
    """
    owner, name = type(collection).__name__, kind.__name__.removeprefix("Base")
    # A generator would be consumed by the checks.
    if not isinstance(tables, Sequence) or isinstance(tables, str):
        given = f"{tables!r:.100}" if isinstance(tables, str) else f"a {type(tables).__name__}"
        raise TypeError(f"{owner}: tables must be a list of {name}, got {given}. Put the configs in a list.")
    for table in tables:
        if not isinstance(table, kind):
            raise TypeError(
                f"{owner}: tables must be a list of {name}, got {table!r:.100}. Build every config "
                f"with meshrec.modules.{name}."
            )
