"""Learned weights for the positions in a bag, and an embedding collection which uses them in lookups.

Parameters have TorchRec's names, so that TorchRec checkpoints load.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from meshrec.modules.embedding_modules import EmbeddingBagCollection
from meshrec.modules.parameters import InitializedDict
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

# Shape legend: K keys, B bags from all keys, N IDs.


class FeatureProcessor(nn.Module, ABC):
    """Base class for modules which assign a weight to every ID of a single feature, before the lookup.

    A subclass may also transform the bags.
    """

    @abstractmethod
    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """Return the transformed bags, with a weight per ID."""


class FeatureProcessorsCollection(nn.Module, ABC):
    """Base class for modules which assign a weight to every ID of several features, before the lookup.

    A subclass may also transform the bags.
    """

    @abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the transformed bags, with a weight per ID and the same keys."""


class PositionWeightedModule(FeatureProcessor):
    """Learned position weights for one feature: the i-th ID in a bag gets the i-th weight.

    Args:
        max_feature_length: Number of weights, and maximum length of a bag.
        device: Device for ``position_weight``, which is initialized to 1.

    Raises:
        ValueError: The length is below 1.
    """

    def __init__(self, max_feature_length: int, device: torch.device | None = None) -> None:
        super().__init__()
        _check_length("max_feature_length", max_feature_length)
        self.position_weight = nn.Parameter(torch.empty(max_feature_length, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all weights to 1."""
        nn.init.ones_(self.position_weight)

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """Return the same bags with weights.

        Raises:
            ValueError: A bag is too long. Checked in eager mode on the CPU.
        """
        offsets, lengths = features.offsets(), features.lengths()
        if _can_check(lengths) and lengths.numel() and int(lengths.max()) > self.position_weight.numel():
            bag = int(lengths.argmax())
            raise ValueError(_too_long(f"bag {bag}", int(lengths[bag]), self.position_weight.numel()))
        positions = _positions(offsets, _bag_indices(lengths, features.values().size(0)))
        return JaggedTensor.unchecked(features.values(), self.position_weight[positions], lengths, offsets)


class PositionWeightedModuleCollection(FeatureProcessorsCollection):
    """Learned position weights for several features, with parameters ``position_weights.<feature>``.

    Args:
        max_feature_lengths: Number of weights, and maximum length of a bag, by feature.
        device: Device for the weights.

    Raises:
        ValueError: A length is below 1.
    """

    def __init__(self, max_feature_lengths: Mapping[str, int], device: torch.device | None = None) -> None:
        super().__init__()
        for feature, length in max_feature_lengths.items():
            _check_length(f"max_feature_lengths[{feature!r}]", length)
        self.max_feature_lengths = dict(max_feature_lengths)
        self.position_weights = InitializedDict(
            {feature: torch.empty(size, device=device) for feature, size in max_feature_lengths.items()},
            nn.init.ones_,
        )

    def reset_parameters(self) -> None:
        """Set all weights to 1."""
        self.position_weights.reset_parameters()

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the same bags with weights. Keys without learned weights have weight 1.

        Raises:
            ValueError: A bag is too long. Checked in eager mode on the CPU.
        """
        self._check_bag_lengths(features)
        return KeyedJaggedTensor.unchecked(
            features.keys(),
            features.values(),
            self._weights(features),
            features.lengths(),
            features.offsets(),
            stride=None if features.variable_stride_per_key() else features.stride(),
            strides=features.stride_per_key_per_rank() if features.variable_stride_per_key() else None,
            length_per_key=features.length_per_key_or_none(),
            inverse_indices=features.inverse_indices_or_none(),
        )

    def _weights(self, features: KeyedJaggedTensor) -> Tensor:
        """Return a weight for every ID, [N]: the learned position weight, or 1 if the feature has none."""
        learned = dict(self.position_weights.items())
        device = features.values().device
        key_weights = [learned[key] for key in features.keys() if key in learned]  # noqa: SIM118  not a dict
        table = torch.cat([torch.ones(1, device=device), *key_weights])
        # Entry 0 is the constant 1. Keys without learned weights have start 0 and step 0, so all their
        # positions read it, and a single gather serves all keys.
        starts_K, steps_K, start = [], [], 1
        for key in features.keys():  # noqa: SIM118
            starts_K.append(start if key in learned else 0)
            steps_K.append(int(key in learned))
            start += learned[key].numel() if key in learned else 0
        # output_size is passed throughout, so repeat_interleave need not synchronize.
        bags_N = _bag_indices(features.lengths(), features.values().size(0))
        strides = features.stride_per_key()
        keys_B = torch.arange(len(strides), device=device).repeat_interleave(
            torch.tensor(strides, dtype=torch.int64, device=device), output_size=sum(strides)
        )
        keys_N = keys_B[bags_N]
        # The dtype is explicit because torch infers float for an empty list.
        starts, steps = (
            torch.tensor(values, dtype=torch.int64, device=device) for values in (starts_K, steps_K)
        )
        positions_N = _positions(features.offsets(), bags_N) * steps[keys_N]
        return table[starts[keys_N] + positions_N]

    def _check_bag_lengths(self, features: KeyedJaggedTensor) -> None:
        """Raise ValueError if a bag has more IDs than its feature has weights. Checks CPU tensors only."""
        lengths = features.lengths()
        if not _can_check(lengths):
            return
        # Bag lengths of every key.
        pieces = lengths.split(features.stride_per_key())
        for feature, piece in zip(features.keys(), pieces, strict=True):
            limit = self.max_feature_lengths.get(feature)
            if limit is not None and piece.numel() and int(piece.max()) > limit:
                sample = int(piece.argmax())
                raise ValueError(
                    _too_long(f"feature {feature!r} (sample {sample})", int(piece[sample]), limit)
                )


class FeatureProcessedEmbeddingBagCollection(nn.Module):
    """An EmbeddingBagCollection in which feature processors compute the weight of every ID before the lookup.

    Args:
        embedding_bag_collection: Collection with ``is_weighted=True``. Sharders treat it like other
            collections.
        feature_processors: A processor for every feature of the tables, by feature name, or a single module
            for all features.

    Raises:
        ValueError: The collection is not weighted, or the features and processors do not match.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        feature_processors: Mapping[str, FeatureProcessor] | FeatureProcessorsCollection,
    ) -> None:
        super().__init__()
        if not embedding_bag_collection.is_weighted():
            raise ValueError(
                "the collection ignores weights, so the processors have no effect. Build it with "
                "is_weighted=True."
            )
        configs = embedding_bag_collection.embedding_bag_configs()
        # Features read by the tables, without duplicates, in order.
        self._feature_names = list(dict.fromkeys(name for config in configs for name in config.feature_names))
        self._embedding_bag_collection = embedding_bag_collection
        self._feature_processors: nn.Module
        if isinstance(feature_processors, FeatureProcessorsCollection):
            self._feature_processors = feature_processors
        else:
            if set(feature_processors) != set(self._feature_names):
                raise ValueError(
                    f"the tables read the features {self._feature_names}, the processors are for "
                    f"{list(feature_processors)}. Give each feature one."
                )
            self._feature_processors = nn.ModuleDict(feature_processors)

    def is_weighted(self) -> bool:
        """Return True: the constructor requires a weighted collection."""
        return self._embedding_bag_collection.is_weighted()

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Process the bags, then look up and pool as in ``EmbeddingBagCollection.forward``."""
        return self._embedding_bag_collection(self._process(features))  # type: ignore[no-any-return]

    def _process(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the features with weights from the processors."""
        processors = self._feature_processors
        if not isinstance(processors, nn.ModuleDict):
            return processors(features)  # type: ignore[no-any-return]
        return KeyedJaggedTensor.from_jt_dict(
            {name: processors[name](features[name]) for name in self._feature_names}
        )


def _bag_indices(lengths: Tensor, num_ids: int) -> Tensor:
    """Return the index of the bag to which every ID belongs, int64 [N]."""
    return torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(
        lengths, output_size=num_ids
    )


def _positions(offsets: Tensor, bags: Tensor) -> Tensor:
    """Return the position of every ID in its bag, from 0, [N]."""
    return torch.arange(bags.numel(), device=bags.device) - offsets[bags]


def _can_check(lengths: Tensor) -> bool:
    """Return whether bag lengths can be checked without a synchronization or a graph break."""
    # On a GPU the check would synchronize; there the gather asserts instead.
    return lengths.is_cpu and not torch.compiler.is_compiling()


def _check_length(name: str, length: int) -> None:
    """Raise ValueError if the argument ``name`` is below 1."""
    if length < 1:
        raise ValueError(f"{name} must be 1 or more, got {length}.")


def _too_long(where: str, length: int, limit: int) -> str:
    """Return the error message for a bag with more IDs than there are position weights."""
    return (
        f"{where} has {length} ids, but there are weights for {limit} positions. Cut the bags, or raise the "
        "maximal length."
    )
