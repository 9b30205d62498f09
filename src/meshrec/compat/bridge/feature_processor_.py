"""Feature processors that TorchScript and torch.fx also accept. Eager calls use MeshRec's kernels."""

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from meshrec.compat.bridge.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from meshrec.modules import embedding_modules
from meshrec.modules import feature_processor as core

torch.fx.wrap("weighted_by_position")
torch.fx.wrap("keys_weighted_by_position")
torch.fx.wrap("joined")


class PositionWeightedModule(core.PositionWeightedModule):
    """Learned weight per position in a bag, for a single feature. Weights are initially 1."""

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        if isinstance(features, Proxy):
            return weighted_by_position(features, self.position_weight)
        bags = super().forward(features)
        return JaggedTensor.unchecked(bags.values(), bags.weights(), bags.lengths(), bags.offsets())


class PositionWeightedModuleCollection(core.PositionWeightedModuleCollection):
    """``PositionWeightedModule`` for many features; parameters at ``position_weights.<feature>``."""

    @property
    def position_weights_dict(self) -> dict[str, nn.Parameter]:
        """Position weights by feature."""
        return dict(self.position_weights.items())

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        # While torch.fx traces, the features are a Proxy, and this call becomes a single node.
        if isinstance(features, Proxy):
            weights = self.position_weights_dict
            return keys_weighted_by_position(features, list(weights), list(weights.values()))
        bags = super().forward(features)
        # Not validated again: only the weights differ from the input.
        return KeyedJaggedTensor.unchecked(
            bags.keys(),
            bags.values(),
            bags.weights(),
            bags.lengths(),
            bags.offsets(),
            stride=bags._stride,
            strides=bags._strides,
            length_per_key=bags.length_per_key_or_none(),
            inverse_indices=bags.inverse_indices_or_none(),
        )


class FeatureProcessorDictWrapper(core.FeatureProcessorsCollection):
    """Collection that applies a separate feature processor to each feature. Other keys are dropped."""

    def __init__(self, feature_processors: nn.ModuleDict) -> None:
        super().__init__()
        self._feature_processors = feature_processors

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        names = list(self._feature_processors)
        return joined(names, [self._feature_processors[name](features[name]) for name in names])


class FeatureProcessedEmbeddingBagCollection(core.FeatureProcessedEmbeddingBagCollection):
    """EmbeddingBagCollection whose per-sample weights are computed by feature processors."""

    def split(self) -> tuple[core.FeatureProcessorsCollection, embedding_modules.EmbeddingBagCollection]:
        """Return the feature processors and the embedding collection, which give the same result if run in
        sequence.
        """
        processors = self._feature_processors
        if isinstance(processors, nn.ModuleDict):
            processors = FeatureProcessorDictWrapper(processors)
        return processors, self._embedding_bag_collection

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        processors = self._feature_processors
        if isinstance(processors, nn.ModuleDict):
            names = self._feature_names
            features = joined(names, [processors[name](features[name]) for name in names])
        else:
            features = processors(features)
        return self._embedding_bag_collection(features)


def weighted_by_position(bags: JaggedTensor, weights: Tensor) -> JaggedTensor:
    """Return the bags with a weight per value: the weight of the value's position in the bag."""
    positions = positions_in_bags(bags.offsets(), bags.values())
    return JaggedTensor(
        values=bags.values(), weights=weights[positions], lengths=bags.lengths(), offsets=bags.offsets()
    )


def keys_weighted_by_position(
    features: KeyedJaggedTensor, names: list[str], weights: list[Tensor]
) -> KeyedJaggedTensor:
    """Return the bags of all keys, with a weight per value: the weight of the value's position in the bag.

    Values of keys without position weights get weight 1.

    Args:
        weights: position weights per name, [maximum bag length].
    """
    weight_of: dict[str, Tensor] = {}
    for i in range(len(names)):
        weight_of[names[i]] = weights[i]
    positions = torch.split(
        positions_in_bags(features.offsets(), features.values()), features.length_per_key()
    )
    parts: list[Tensor] = [torch.ones(0, device=features.device())]  # a batch may have no keys
    for i, key in enumerate(features.keys()):
        if key in weight_of:
            parts.append(weight_of[key][positions[i]])
        else:
            parts.append(torch.ones(positions[i].size(0), device=features.device()))
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=torch.cat(parts),
        lengths=features.lengths(),
        offsets=features.offsets(),
        stride=features._stride,
        stride_per_key_per_rank=features._stride_per_key_per_rank,
        length_per_key=features.length_per_key(),
        inverse_indices=features.inverse_indices_or_none(),
    )


def joined(names: list[str], bags: list[JaggedTensor]) -> KeyedJaggedTensor:
    """Combine per-feature bags into a KeyedJaggedTensor."""
    by_name: dict[str, JaggedTensor] = {}
    for i in range(len(names)):
        by_name[names[i]] = bags[i]
    return KeyedJaggedTensor.from_jt_dict(by_name)


def positions_in_bags(offsets: Tensor, values: Tensor) -> Tensor:
    """Return the position within the bag for every value, int64 [N]."""
    # In TorchScript's subset, so without MeshRec's kernel.
    lengths = offsets[1:] - offsets[:-1]
    bags = torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(lengths)
    return torch.arange(values.size(0), device=offsets.device) - offsets[bags]
