"""TorchRec's older position weights: of a dictionary of features, and of a KeyedJaggedTensor."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from meshrec.compat.bridge.feature_processor_ import (
    PositionWeightedModuleCollection,
    keys_weighted_by_position,
    positions_in_bags,
    weighted_by_position,
)
from meshrec.compat.bridge.sparse import JaggedTensor, KeyedJaggedTensor

torch.fx.wrap("weighted_bags")
torch.fx.wrap("weighted_keys")


class _PositionWeighted(nn.Module):
    def __init__(self, max_feature_lengths: Mapping[str, int], device: torch.device | None = None) -> None:
        super().__init__()
        collection = PositionWeightedModuleCollection(max_feature_lengths, device)
        self.max_feature_lengths = dict(max_feature_lengths)
        self.position_weights = collection.position_weights
        self._run = (collection,)  # not a submodule: its parameters are this module's


class PositionWeightedModule(_PositionWeighted):
    """Gives the ids of some features learned weights by position; parameters at
    ``position_weights.<feature>``.

    Args:
        max_feature_lengths: by feature the ids in its longest bag.
        device: where the weights live.
    """

    def reset_parameters(self) -> None:
        """Sets all weights to 1."""
        self.position_weights.reset_parameters()

    def forward(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """``features`` itself, with the bags of its features replaced by weighted ones."""
        if isinstance(features, Proxy):
            return weighted_bags(
                features, list(self.max_feature_lengths), list(self.position_weights.values())
            )
        names = list(self.max_feature_lengths)
        kjt = KeyedJaggedTensor.from_jt_dict({name: _bare(features[name]) for name in names})
        features.update(self._run[0](kjt).to_dict())
        return features


class PositionWeightedProcessor(_PositionWeighted):
    """Gives the ids of some features learned weights by position; parameters at
    ``position_weights.<feature>``.

    Args:
        max_feature_lengths: by feature the ids in its longest bag.
        device: where the weights live.
    """

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The bags of its features with weights, without other keys; all of them unchanged if it has none."""
        if isinstance(features, Proxy):
            names = list(self.max_feature_lengths)
            return weighted_keys(features, names, list(self.position_weights.values()))
        chosen = [i for i, key in enumerate(features.keys()) if key in self.max_feature_lengths]
        if not chosen:
            return features
        weighted: KeyedJaggedTensor = self._run[0](features)
        return weighted if len(chosen) == len(features.keys()) else weighted.permute(chosen)


def _bare(bags: JaggedTensor) -> JaggedTensor:
    return JaggedTensor(bags.values(), lengths=bags.lengths(), offsets=bags.offsets())


def weighted_bags(
    features: dict[str, JaggedTensor], names: list[str], weights: list[Tensor]
) -> dict[str, JaggedTensor]:
    """``features`` itself, with the bags of the named ones replaced by weighted ones."""
    for i in range(len(names)):
        features[names[i]] = weighted_by_position(features[names[i]], weights[i])
    return features


def weighted_keys(features: KeyedJaggedTensor, names: list[str], weights: list[Tensor]) -> KeyedJaggedTensor:
    """The bags of the named keys with weights, without other keys; all of them unchanged if none is there."""
    chosen: list[int] = []
    for i, key in enumerate(features.keys()):
        if key in names:
            chosen.append(i)
    if len(chosen) == 0:
        return features
    weighted = keys_weighted_by_position(features, names, weights)
    return weighted if len(chosen) == len(features.keys()) else weighted.permute(chosen)


def offsets_to_range_traceble(offsets: Tensor, values: Tensor) -> Tensor:
    """The position of each value in its bag."""
    return positions_in_bags(offsets, values)
