"""TorchRec's older position-weight modules, for feature dicts and for KeyedJaggedTensors."""

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

# torch.fx records these two as one call each. They loop over keys, which a proxy does not know.
torch.fx.wrap("weighted_bags")
torch.fx.wrap("weighted_keys")


class _PositionWeighted(nn.Module):
    """Common base of both modules: a learned weight per feature and position in the bag, initially 1."""

    def __init__(self, max_feature_lengths: Mapping[str, int], device: torch.device | None = None) -> None:
        super().__init__()
        collection = PositionWeightedModuleCollection(max_feature_lengths, device)
        self.max_feature_lengths = dict(max_feature_lengths)
        self.position_weights = collection.position_weights
        self._run = (collection,)  # not a submodule: its parameters are this module's


class PositionWeightedModule(_PositionWeighted):
    """Module that multiplies bags by learned position weights. Takes a dict of features.

    The parameter of a feature is ``position_weights.<feature>``, [maximum bag length].

    Args:
        max_feature_lengths: maximum bag length by feature.
        device: device for the weights.
    """

    def reset_parameters(self) -> None:
        """Set all weights to 1."""
        self.position_weights.reset_parameters()

    def forward(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Replace the module's features in ``features`` by weighted bags, and return ``features``."""
        # While torch.fx traces, the features are a Proxy, and this call becomes a single node.
        if isinstance(features, Proxy):
            return weighted_bags(
                features, list(self.max_feature_lengths), list(self.position_weights.values())
            )
        names = list(self.max_feature_lengths)
        kjt = KeyedJaggedTensor.from_jt_dict({name: _bare(features[name]) for name in names})
        features.update(self._run[0](kjt).to_dict())
        return features


class PositionWeightedProcessor(_PositionWeighted):
    """Module that multiplies bags by learned position weights. Takes a KeyedJaggedTensor.

    The parameter of a key is ``position_weights.<key>``, [maximum bag length].

    Args:
        max_feature_lengths: maximum bag length by key.
        device: device for the weights.
    """

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return weighted bags for the module's features, and drop other keys.

        Returns the input unchanged if it has none of these features.
        """
        # While torch.fx traces, the features are a Proxy, and this call becomes a single node.
        if isinstance(features, Proxy):
            names = list(self.max_feature_lengths)
            return weighted_keys(features, names, list(self.position_weights.values()))
        indices = [i for i, key in enumerate(features.keys()) if key in self.max_feature_lengths]
        if not indices:
            return features
        weighted: KeyedJaggedTensor = self._run[0](features)
        return weighted if len(indices) == len(features.keys()) else weighted.permute(indices)


def _bare(bags: JaggedTensor) -> JaggedTensor:
    """Return the same bags without weights."""
    # Weights of the input are dropped: position weights replace them.
    return JaggedTensor(bags.values(), lengths=bags.lengths(), offsets=bags.offsets())


def weighted_bags(
    features: dict[str, JaggedTensor], names: list[str], weights: list[Tensor]
) -> dict[str, JaggedTensor]:
    """Replace the named features in ``features`` by weighted bags, and return ``features``.

    Args:
        weights: position weights per name, [maximum bag length].
    """
    for i in range(len(names)):
        features[names[i]] = weighted_by_position(features[names[i]], weights[i])
    return features


def weighted_keys(features: KeyedJaggedTensor, names: list[str], weights: list[Tensor]) -> KeyedJaggedTensor:
    """Return weighted bags for the named keys, and drop other keys.

    Returns the input unchanged if it has none of these keys.

    Args:
        weights: position weights per name, [maximum bag length].
    """
    indices: list[int] = []
    for i, key in enumerate(features.keys()):
        if key in names:
            indices.append(i)
    if len(indices) == 0:
        return features
    weighted = keys_weighted_by_position(features, names, weights)
    return weighted if len(indices) == len(features.keys()) else weighted.permute(indices)


def offsets_to_range_traceble(offsets: Tensor, values: Tensor) -> Tensor:
    """Return the position within the bag for every value."""
    return positions_in_bags(offsets, values)
