"""TorchRec's collections with a fused optimizer, which updates tables in the backward pass."""

import enum
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from meshrec import modules, tables
from meshrec.compat.bridge import embeddings
from meshrec.compat.bridge.optimizers import spec_of
from meshrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from meshrec.tables.fused import WholeTables

_Optimizer = type[torch.optim.Optimizer]


class EmbeddingLocation(enum.IntEnum):
    """FBGEMM's memory kinds for tables. DEVICE and HOST are accepted without effect; others are rejected."""

    DEVICE = 0
    MANAGED = 1
    MANAGED_CACHING = 2
    HOST = 3
    MTIA = 4


_LOCATIONS = ("DEVICE", "HOST")


class CallableFusedOptimizer(tables.FusedOptimizer):
    """Fused optimizer that returns itself when called, because TorchRec's ``fused_optimizer`` is a method."""

    def __call__(self) -> "CallableFusedOptimizer":
        """Return this object."""
        return self


class _Fused:
    """Common base of both fused collections: attaches the optimizer, and returns it by TorchRec's methods."""

    _updater: WholeTables | None

    def _fuse(self, optimizer_type: _Optimizer, optimizer_kwargs: Mapping[str, Any], location: Any) -> None:
        """Attach a fused optimizer to all tables.

        Args:
            location: None, DEVICE or HOST. Only checked: the tables stay on the device they are on.
        """
        if location is not None and getattr(location, "name", location) not in _LOCATIONS:
            raise ValueError(
                f"location {location!r} is not to be had: tables are where device says. Leave it out, or "
                f"pass one of {list(_LOCATIONS)}."
            )
        # For optimizer_type() and optimizer_kwargs().
        self._optimizer = (optimizer_type, dict(optimizer_kwargs))
        spec = spec_of({"optimizer": optimizer_type, **optimizer_kwargs})
        modules.fuse(cast(nn.Module, self), optimizer=spec)
        updater = self._updater
        assert updater is not None
        updater.optimizer = CallableFusedOptimizer(updater.optimizer.tables, None)

    def optimizer_type(self) -> _Optimizer:
        """Return the optimizer class from the constructor."""
        return self._optimizer[0]

    def optimizer_kwargs(self) -> dict[str, Any]:
        """Return the optimizer arguments from the constructor."""
        return self._optimizer[1]


class FusedEmbeddingBagCollection(_Fused, embeddings.EmbeddingBagCollection):
    """EmbeddingBagCollection with table updates in the backward pass.

    Args:
        tables: table configs with unique names.
        optimizer_type: SGD, Adagrad or Adam from torch.optim, or a torchrec.optim class.
        optimizer_kwargs: optimizer arguments.
        is_weighted: whether per-sample weights scale the rows.
        device: device for the parameters; not ``meta``.
        location: None, DEVICE or HOST. Accepted as in TorchRec, but without effect: the tables are on
            ``device``.

    Raises:
        ValueError: the optimizer cannot be fused, or the location is not supported.
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
        self._fuse(optimizer_type, optimizer_kwargs, location)


class FusedEmbeddingCollection(_Fused, embeddings.EmbeddingCollection):
    """EmbeddingCollection with table updates in the backward pass.

    FusedEmbeddingBagCollection documents the other arguments.

    Args:
        need_indices: whether outputs have the IDs in ``weights``.

    Raises:
        ValueError: the optimizer cannot be fused, or the location is not supported.
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
        self._fuse(optimizer_type, optimizer_kwargs, location)


def fuse_embedding_optimizer(
    model: nn.Module,
    optimizer_type: _Optimizer,
    optimizer_kwargs: Mapping[str, Any],
    device: torch.device | str | None = None,
    location: Any = None,
) -> nn.Module:
    """Replace all collections in a model by fused collections with the same weights.

    Args:
        model: collection, or model with collections inside. Changed in place.
        optimizer_type: optimizer class.
        optimizer_kwargs: optimizer arguments.
        device: device for the fused collections.
        location: see ``FusedEmbeddingBagCollection``.

    Returns:
        The model; for a collection, the fused replacement.

    Raises:
        ValueError: the optimizer cannot be fused, or the location is not supported.
    """

    def fused(module: nn.Module) -> nn.Module:
        """Return a fused collection for a collection. Replace the collections inside other modules."""
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
        # Meta collections have no weights to copy; the new collection keeps its own initial values.
        if not any(parameter.is_meta for parameter in module.parameters()):
            new.load_state_dict(module.state_dict())
        return new

    return fused(model)
