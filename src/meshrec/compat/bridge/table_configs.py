"""TorchRec's table configs: MeshRec's with mutable attributes."""

from dataclasses import dataclass, fields, replace
from typing import Any

from meshrec.modules import embedding_configs


class SettableConfig:
    """Mixin that makes the attributes of a table config settable.

    A collection copies the values when it is constructed, so later assignments do not change the collection.
    Assigning an invalid value raises ValueError.
    """

    _counterpart: type

    def __setattr__(self, name: str, value: Any) -> None:
        if name in {field.name for field in fields(self)}:  # type: ignore[arg-type]
            # Runs the config's own validation on a copy, before the attribute changes.
            replace(self, **{name: value})  # type: ignore[type-var]
        object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        """Compare with a config of this class, or of the MeshRec class."""
        if not isinstance(other, self._counterpart):
            return NotImplemented
        names = [field.name for field in fields(self._counterpart) if field.compare]
        pruned = [getattr(config, "num_embeddings_post_pruning", None) for config in (self, other)]
        return pruned[0] == pruned[1] and all(getattr(self, name) == getattr(other, name) for name in names)

    # Unhashable, as in TorchRec, because fields can change.
    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class _BagFields(embedding_configs.EmbeddingBagConfig):
    """MeshRec's config of a table with pooling, and the additional field of TorchRec's."""

    num_embeddings_post_pruning: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Fields(embedding_configs.EmbeddingConfig):
    """MeshRec's config of a table without pooling, and the additional field of TorchRec's."""

    num_embeddings_post_pruning: int | None = None


class EmbeddingBagConfig(SettableConfig, _BagFields):
    """Table with pooled rows. ``num_embeddings_post_pruning``: rows that quantization kept, or None."""

    _counterpart = embedding_configs.EmbeddingBagConfig


class EmbeddingConfig(SettableConfig, _Fields):
    """Table without pooling. ``num_embeddings_post_pruning``: see `EmbeddingBagConfig`."""

    _counterpart = embedding_configs.EmbeddingConfig
