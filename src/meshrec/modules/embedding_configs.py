"""Configuration of embedding tables: size, features, pooling and initialisation."""

import enum
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from meshrec.tables.file_rows import FileRows
from meshrec.tables.hashed_keys import Hashed
from meshrec.tables.storage import DenseRows, QuantisedRows

# What torch assigns to every module; a table is a module inside another one.
_TAKEN_NAMES = frozenset(vars(nn.Module()))


class PoolingType(enum.Enum):
    """The pooling of a bag's rows. NONE returns one row per ID (sequence embeddings)."""

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


class _Named(enum.EnumMeta):
    """Enum type whose error for an unknown name lists the known ones."""

    def __getattr__(cls, name: str) -> Any:
        members = vars(cls).get("_member_map_", {})
        if name in members:
            return members[name]
        if name.startswith("_"):
            return super().__getattribute__(name)  # says so
        raise AttributeError(_no_data_type(name, members))


def _no_data_type(name: object, members: Iterable[str]) -> str:
    return (
        f"tables have no data type {name}. Choose one of {', '.join(members)}; codes are unsigned, so that "
        "what others call UINT8 is INT8."
    )


class DataType(enum.Enum, metaclass=_Named):
    """Data type of a table's elements."""

    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"
    INT8 = "INT8"
    """Quantised, like INT4 and INT2: codes of 8, 4 or 2 bits, for inference only."""
    INT4 = "INT4"
    INT2 = "INT2"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise ValueError(_no_data_type(value, cls.__members__))

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype; uint8 for the memory of quantised rows."""
        return {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}.get(
            self.value, torch.uint8
        )

    @property
    def bits(self) -> int:
        """Bits per code of quantised rows; 0 for floating-point rows."""
        return {"INT8": 8, "INT4": 4, "INT2": 2}.get(self.value, 0)

    def __str__(self) -> str:
        return self.value


class BoundsCheckMode(enum.Enum):
    """Handling of an ID that is outside its table."""

    ERROR = "error"
    """Raise ValueError before anything is looked up. The message names table, feature, sample and ID."""
    WARN = "warn"
    """Replace the ID by 0, count it in ``num_clamped_ids``, and log it once."""
    OFF = "off"
    """Do not check. Such an ID reads memory outside the table, so the input must be checked elsewhere."""


def can_name_table(name: str) -> bool:
    """Return whether a table can have this name in everything that a model is converted to.

    The name must not be empty, contain a dot, or be an attribute of modules or of dictionaries of modules:
    torch.export does not find a table named ``keys``.
    """
    return bool(name) and "." not in name and name not in _TAKEN_NAMES and not hasattr(nn.ModuleDict, name)


@dataclass(frozen=True, kw_only=True)
class BaseEmbeddingConfig:
    """A table of ``num_embeddings`` rows of width ``embedding_dim``.

    Args:
        num_embeddings: number of rows; IDs lie in ``[0, num_embeddings)``. It is left out where ``keys`` is
            given, and then is the number of rows that there may be.
        embedding_dim: width of a row.
        name: unique name in the collection. It is part of the parameter's name, so it has no dot.
        feature_names: features whose IDs are looked up in this table. Several features may share a table, and
            one feature may read several tables.
        data_type: data type of the elements.
        init_fn: fills the new weight ``[num_embeddings, embedding_dim]`` in place. By default the elements
            are uniform in ``[weight_init_min, weight_init_max]``, which default to
            ``-sqrt(1/num_embeddings)`` and ``sqrt(1/num_embeddings)``.
        storage: where the rows of a sharded module are; None: in memory. See ``FileRows``.
        keys: ``meshrec.Hashed(max_rows=...)`` for a table whose IDs nobody can number: any int64 is an ID,
            and rows come and go. First rows are a function of (seed, table, ID); ``init_fn`` then fills one
            row ``[1, embedding_dim]`` at a time, which is slow.

    Raises:
        ValueError: a size is below 1, the name is empty or has a dot, features are missing or given twice, or
            a quantised table has a storage.
    """

    num_embeddings: int = 0
    embedding_dim: int
    name: str
    feature_names: Sequence[str]
    data_type: DataType = DataType.FP32
    weight_init_min: float | None = None
    weight_init_max: float | None = None
    init_fn: Callable[[Tensor], object] | None = field(default=None, compare=False)
    storage: FileRows | None = None
    keys: Hashed | None = None

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
        twice = sorted({f for f in self.feature_names if list(self.feature_names).count(f) > 1})
        if twice:
            raise ValueError(f"table {self.name!r}: features {twice} are given twice. Name each once.")

    def _max_rows(self, keys: Hashed) -> int:
        """Return the number of rows of a table with hashed keys."""
        if not isinstance(keys, Hashed):
            raise ValueError(f"table {self.name!r}: keys must be meshrec.Hashed(...) or None, got {keys!r}.")
        if not isinstance(self.embedding_dim, int) or self.embedding_dim < 1:
            return 1  # the caller says what is wrong
        try:
            bits = self.data_type.bits
            form = QuantisedRows(bits) if bits else DenseRows(self.data_type.dtype)
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
        """The range [low, high) of initial values, unless ``init_fn`` is given."""
        bound = math.sqrt(1 / self.num_embeddings)
        low = -bound if self.weight_init_min is None else self.weight_init_min
        return low, bound if self.weight_init_max is None else self.weight_init_max

    def init_weight(self, weight: Tensor) -> None:
        """Initialise a weight of this table in place."""
        with torch.no_grad():
            if self.init_fn is not None:
                self.init_fn(weight)
                return
            weight.uniform_(*self.init_bounds)


@dataclass(frozen=True, kw_only=True)
class EmbeddingBagConfig(BaseEmbeddingConfig):
    """A table whose rows are pooled bag by bag; ``pooling`` is SUM or MEAN.

    Raises:
        ValueError: as for `BaseEmbeddingConfig`, or pooling is NONE.
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
    """A table that returns one row per ID (sequence embeddings)."""
