"""TorchRec's collections with a built-in optimizer: ``meshrec.fuse`` under TorchRec's names."""

import enum
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from meshrec import modules, tables
from meshrec.compat.bridge import embeddings
from meshrec.compat.bridge.optimizers import spec_of
from meshrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig

M = TypeVar("M", bound=nn.Module)

_Optimizer = type[torch.optim.Optimizer]


class EmbeddingLocation(enum.IntEnum):
    """FBGEMM's memory of a table. DEVICE and HOST say where tables are anyway; others are refused."""

    DEVICE = 0
    MANAGED = 1
    MANAGED_CACHING = 2
    HOST = 3
    MTIA = 4


_PLACES = ("DEVICE", "HOST")


class CallableFusedOptimizer(tables.FusedOptimizer):
    """MeshRec's fused optimizer, which TorchRec's programs get by a call:
    ``collection.fused_optimizer()``.
    """

    def __call__(self) -> "CallableFusedOptimizer":
        """Return this object."""
        return self


class FusedEmbeddingBagCollection(embeddings.EmbeddingBagCollection):
    """An EmbeddingBagCollection whose backward pass updates the tables.

    Args:
        tables: the tables, with unique names.
        optimizer_type: SGD, Adagrad or Adam of torch.optim, or a class of torchrec.optim.
        optimizer_kwargs: arguments of the optimizer.
        is_weighted: whether each row is scaled by the input's weight of its ID.
        device: device of the parameters; not ``meta``.
        location: must be left out, or DEVICE or HOST.

    Raises:
        ValueError: the optimizer cannot be fused, or the location is another one.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        optimizer_type: _Optimizer,
        optimizer_kwargs: Mapping[str, Any],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        location: Any = None,
    ) -> None:
        super().__init__(tables, is_weighted, device)
        self._optimizer = (optimizer_type, dict(optimizer_kwargs))
        _fuse(self, *self._optimizer, location)

    def optimizer_type(self) -> _Optimizer:
        """Return the class that was given."""
        return self._optimizer[0]

    def optimizer_kwargs(self) -> dict[str, Any]:
        """Return the arguments that were given."""
        return self._optimizer[1]


class FusedEmbeddingCollection(embeddings.EmbeddingCollection):
    """An EmbeddingCollection whose backward pass updates the tables.

    Args:
        need_indices: whether the results have the IDs as weights. The other arguments are those of
            FusedEmbeddingBagCollection.

    Raises:
        ValueError: the optimizer cannot be fused, or the location is another one.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        optimizer_type: _Optimizer,
        optimizer_kwargs: Mapping[str, Any],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        location: Any = None,
    ) -> None:
        super().__init__(tables, device, need_indices)
        self._optimizer = (optimizer_type, dict(optimizer_kwargs))
        _fuse(self, *self._optimizer, location)

    def optimizer_type(self) -> _Optimizer:
        """Return the class that was given."""
        return self._optimizer[0]

    def optimizer_kwargs(self) -> dict[str, Any]:
        """Return the arguments that were given."""
        return self._optimizer[1]


def fuse_embedding_optimizer(
    model: nn.Module,
    optimizer_type: _Optimizer,
    optimizer_kwargs: Mapping[str, Any],
    device: torch.device | str | None = None,
    location: Any = None,
) -> nn.Module:
    """Replace all collections in a model by fused ones, which keep the weights.

    Args:
        model: a collection, or a model that contains some. It is changed.
        optimizer_type: optimizer of the fused collections.
        optimizer_kwargs: arguments of the optimizer.
        device: device of the fused collections.
        location: see ``FusedEmbeddingBagCollection``.

    Returns:
        The model, or the fused collection if it is a collection.

    Raises:
        ValueError: the optimizer cannot be fused, or the location is another one.
    """

    def fused(module: nn.Module) -> nn.Module:
        new: nn.Module
        if isinstance(module, embeddings.EmbeddingBagCollection):
            configs, weighted = module.embedding_bag_configs(), module.is_weighted()
            new = FusedEmbeddingBagCollection(
                configs, optimizer_type, optimizer_kwargs, weighted, device, location
            )
        elif isinstance(module, embeddings.EmbeddingCollection):
            new = FusedEmbeddingCollection(
                module.embedding_configs(),
                optimizer_type,
                optimizer_kwargs,
                device,
                module.need_indices(),
                location,
            )
        else:
            for name, child in list(module.named_children()):
                setattr(module, name, fused(child))
            return module
        if not any(parameter.is_meta for parameter in module.parameters()):
            new.load_state_dict(module.state_dict())
        return new

    return fused(model)


def _fuse(
    collection: modules.EmbeddingBagCollection | modules.EmbeddingCollection,
    optimizer_type: _Optimizer,
    optimizer_kwargs: Mapping[str, Any],
    location: Any,
) -> None:
    if location is not None and getattr(location, "name", location) not in _PLACES:
        raise ValueError(
            f"location {location!r} is not to be had: tables are where device says. Leave it out, or pass "
            f"one of {list(_PLACES)}."
        )
    modules.fuse(collection, optimizer=spec_of({"optimizer": optimizer_type, **optimizer_kwargs}))
    updater = collection._updater
    assert updater is not None
    updater.optimizer = CallableFusedOptimizer(updater.optimizer.tables, None)
