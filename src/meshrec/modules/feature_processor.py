"""Weights of ids that are learned by position, and a collection that looks up with them.

Names of parameters are TorchRec's, so that its checkpoints load.
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
    """Changes the bags of one feature before they are looked up; gives weights to their ids at least."""

    @abstractmethod
    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """The changed bags."""


class FeatureProcessorsCollection(nn.Module, ABC):
    """Changes the bags of many features before they are looked up; gives weights to their ids at least."""

    @abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The changed bags, of the same keys."""


class PositionWeightedModule(FeatureProcessor):
    """Gives the i-th id of every bag the i-th of ``max_feature_length`` learned weights, at first 1.

    Args:
        max_feature_length: ids in the longest bag.
        device: where ``position_weight`` lives.

    Raises:
        ValueError: for a length below 1.
    """

    def __init__(self, max_feature_length: int, device: torch.device | None = None) -> None:
        super().__init__()
        _check_length("max_feature_length", max_feature_length)
        self.position_weight = nn.Parameter(torch.empty(max_feature_length, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets all weights to 1."""
        nn.init.ones_(self.position_weight)

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """The same bags with weights.

        Raises:
            ValueError: for a bag that is too long, in eager mode on CPU.
        """
        offsets, lengths = features.offsets(), features.lengths()
        if _checks(lengths) and lengths.numel() and int(lengths.max()) > self.position_weight.numel():
            bag = int(lengths.argmax())
            raise ValueError(_too_long(f"bag {bag}", int(lengths[bag]), self.position_weight.numel()))
        positions = _positions(offsets, _bags(lengths, features.values().size(0)))
        return JaggedTensor.unchecked(features.values(), self.position_weight[positions], lengths, offsets)


class PositionWeightedModuleCollection(FeatureProcessorsCollection):
    """``PositionWeightedModule`` for many features at once; parameters at ``position_weights.<feature>``.

    Args:
        max_feature_lengths: by feature the ids in its longest bag.
        device: where the weights live.

    Raises:
        ValueError: for a length below 1.
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
        """Sets all weights to 1."""
        self.position_weights.reset_parameters()

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The same bags with weights; ids of keys without learned weights weigh 1.

        Raises:
            ValueError: for a bag that is too long, in eager mode on CPU.
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
        """One weight per id: all learned weights in a row, after a 1 for the other keys."""
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
            torch.tensor(strides, device=device), output_size=sum(strides)
        )
        keys_N = keys_B[bags_N]
        positions_N = _positions(features.offsets(), bags_N) * torch.tensor(steps_K, device=device)[keys_N]
        return table[torch.tensor(starts_K, device=device)[keys_N] + positions_N]

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
    """A weighted EmbeddingBagCollection, with feature processors that make the weights.

    Args:
        embedding_bag_collection: the tables, with ``is_weighted=True``; sharded as any other.
        feature_processors: a processor for every feature of the tables, by name; or one module for all.

    Raises:
        ValueError: for a collection that is not weighted, and for features without a processor or the
            reverse.
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
        """Always."""
        return self._embedding_bag_collection.is_weighted()

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Processes, looks up and pools: as ``EmbeddingBagCollection.forward``."""
        return self._embedding_bag_collection(self._processed(features))  # type: ignore[no-any-return]

    def _processed(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        processors = self._feature_processors
        if not isinstance(processors, nn.ModuleDict):
            return processors(features)  # type: ignore[no-any-return]
        return KeyedJaggedTensor.from_jt_dict(
            {name: processors[name](features[name]) for name in self._feature_names}
        )


def _bags(lengths: Tensor, num_ids: int) -> Tensor:
    """The bag of each id."""
    return torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(
        lengths, output_size=num_ids
    )


def _positions(offsets: Tensor, bags: Tensor) -> Tensor:
    """The position of each id in its bag."""
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
