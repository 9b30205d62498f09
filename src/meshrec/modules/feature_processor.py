"""Weights of IDs that are learned by position, and a collection that uses them in lookups.

Parameters have TorchRec's names, so that its checkpoints load.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from meshrec.modules.embedding_modules import EmbeddingBagCollection
from meshrec.modules.parameters import InitializedDict
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

# K keys, B bags of all keys, N ids


class FeatureProcessor(nn.Module, ABC):
    """Module that changes the bags of one feature before the lookup, and gives weights to their IDs."""

    @abstractmethod
    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """Return the changed bags."""


class FeatureProcessorsCollection(nn.Module, ABC):
    """Module that changes the bags of many features before the lookup, and gives weights to their IDs."""

    @abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the changed bags, with the same keys."""


class PositionWeightedModule(FeatureProcessor):
    """Weights by position: the i-th ID of every bag gets the i-th of ``max_feature_length`` learned weights.

    Args:
        max_feature_length: maximum number of IDs in a bag.
        device: device of ``position_weight``, whose initial values are 1.

    Raises:
        ValueError: the length is below 1.
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
            ValueError: a bag is too long. Checked in eager mode on the CPU.
        """
        offsets, lengths = features.offsets(), features.lengths()
        if _checks(lengths) and lengths.numel() and int(lengths.max()) > self.position_weight.numel():
            bag = int(lengths.argmax())
            raise ValueError(_too_long(f"bag {bag}", int(lengths[bag]), self.position_weight.numel()))
        positions = _positions(offsets, _bags(lengths, features.values().size(0)))
        return JaggedTensor.unchecked(features.values(), self.position_weight[positions], lengths, offsets)


class PositionWeightedModuleCollection(FeatureProcessorsCollection):
    """``PositionWeightedModule`` for many features, with parameters at ``position_weights.<feature>``.

    Args:
        max_feature_lengths: maximum number of IDs in a bag, by feature.
        device: device of the weights.

    Raises:
        ValueError: a length is below 1.
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
        """Return the same bags with weights. IDs of keys without learned weights have weight 1.

        Raises:
            ValueError: a bag is too long. Checked in eager mode on the CPU.
        """
        self._check(features)
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
        """Return one weight per ID [N]: learned for the processed keys, 1 for other keys."""
        learned = dict(self.position_weights.items())
        device = features.values().device
        known = [learned[key] for key in features.keys() if key in learned]  # noqa: SIM118  not a dict
        table = torch.cat([torch.ones(1, device=device), *known])
        starts_K, steps_K, start = [], [], 1
        for key in features.keys():  # noqa: SIM118
            starts_K.append(start if key in learned else 0)
            steps_K.append(int(key in learned))
            start += learned[key].numel() if key in learned else 0
        bags_N = _bags(features.lengths(), features.values().size(0))
        strides = features.stride_per_key()
        keys_B = torch.arange(len(strides), device=device).repeat_interleave(
            torch.tensor(strides, dtype=torch.int64, device=device), output_size=sum(strides)
        )
        keys_N = keys_B[bags_N]
        # Without keys the lists are empty, and torch would take them for floats.
        starts, steps = (torch.tensor(each, dtype=torch.int64, device=device) for each in (starts_K, steps_K))
        positions_N = _positions(features.offsets(), bags_N) * steps[keys_N]
        return table[starts[keys_N] + positions_N]

    def _check(self, features: KeyedJaggedTensor) -> None:
        lengths = features.lengths()
        if not _checks(lengths):
            return
        pieces = lengths.split(features.stride_per_key())
        for feature, piece in zip(features.keys(), pieces, strict=True):
            limit = self.max_feature_lengths.get(feature)
            if limit is not None and piece.numel() and int(piece.max()) > limit:
                sample = int(piece.argmax())
                raise ValueError(
                    _too_long(f"feature {feature!r} (sample {sample})", int(piece[sample]), limit)
                )


class FeatureProcessedEmbeddingBagCollection(nn.Module):
    """A weighted EmbeddingBagCollection whose weights come from feature processors.

    Args:
        embedding_bag_collection: the tables, with ``is_weighted=True``. They are sharded like any others.
        feature_processors: a processor for every feature of the tables, by name; or one module for all.

    Raises:
        ValueError: the collection is not weighted, or the features and the processors do not match.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        feature_processors: Mapping[str, FeatureProcessor] | FeatureProcessorsCollection,
    ) -> None:
        super().__init__()
        if not embedding_bag_collection.is_weighted():
            raise ValueError(
                "the collection takes no weights, so the processors' would be lost. Make it with "
                "is_weighted=True."
            )
        configs = embedding_bag_collection.embedding_bag_configs()
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
        """Return whether the collection is weighted, which it always is."""
        return self._embedding_bag_collection.is_weighted()

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Process the bags, look them up and pool, as ``EmbeddingBagCollection.forward`` does."""
        return self._embedding_bag_collection(self._processed(features))  # type: ignore[no-any-return]

    def _processed(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        processors = self._feature_processors
        if not isinstance(processors, nn.ModuleDict):
            return processors(features)  # type: ignore[no-any-return]
        return KeyedJaggedTensor.from_jt_dict(
            {name: processors[name](features[name]) for name in self._feature_names}
        )


def _bags(lengths: Tensor, num_ids: int) -> Tensor:
    """Return the bag of each ID."""
    return torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(
        lengths, output_size=num_ids
    )


def _positions(offsets: Tensor, bags: Tensor) -> Tensor:
    """Return the position of each ID in its bag."""
    return torch.arange(bags.numel(), device=bags.device) - offsets[bags]


def _checks(lengths: Tensor) -> bool:
    # On a GPU this would wait for the device; there the indexing asserts.
    return lengths.is_cpu and not torch.compiler.is_compiling()


def _check_length(name: str, length: int) -> None:
    if length < 1:
        raise ValueError(f"{name} must be 1 or more, got {length}.")


def _too_long(where: str, length: int, limit: int) -> str:
    return (
        f"{where} has {length} ids, but there are weights for {limit} positions. Cut the bags, or raise the "
        "maximal length."
    )
