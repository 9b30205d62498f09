"""TorchRec's managed collisions: modules that map raw IDs to rows of a fixed table, with TorchRec's results.

They are for existing programs. New programs take tables with hashed keys (``meshrec.Hashed``), whose rows do
not depend on the number of ranks.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from meshrec.compat.bridge.eviction import MCHEvictionPolicy
from meshrec.compat.bridge.sparse import JaggedTensor, KeyedJaggedTensor
from meshrec.modules import BaseEmbeddingConfig

_logger = logging.getLogger(__name__)
_MOST_SEGMENTS = 1025
_EMPTY = torch.iinfo(torch.int64).max
Hash = Callable[[Tensor, int], Tensor]
Jagged = dict[str, JaggedTensor]


class ManagedCollisionModule(nn.Module, ABC):
    """A module that maps raw IDs to rows in ``[0, output_size())``.

    Args:
        device: the device of its state.
        output_segments: the ends of the parts that the rows can be cut into.
    """

    _output_segments_tensor: Tensor
    _current_iter_tensor: Tensor

    def __init__(self, device: torch.device, output_segments: list[int]) -> None:
        super().__init__()
        if len(output_segments) > _MOST_SEGMENTS:
            raise ValueError(f"{len(output_segments)} output segments; at most {_MOST_SEGMENTS} are allowed.")
        self._device = device
        padded = output_segments + [-1] * (_MOST_SEGMENTS - len(output_segments))
        self.register_buffer("_output_segments_tensor", torch.tensor(padded, device=device))
        self.register_buffer("_current_iter_tensor", torch.zeros(1, dtype=torch.int64, device=device))
        self.register_load_state_dict_post_hook(_validate)  # type: ignore[no-untyped-call]

    @property
    def device(self) -> torch.device:
        """The device of the module's buffers."""
        return self._device

    @abstractmethod
    def preprocess(self, features: Jagged) -> Jagged:
        """Return the features that are remapped."""

    @abstractmethod
    def profile(self, features: Jagged) -> Jagged:
        """Record the features in training; admit and evict IDs when that is due."""

    @abstractmethod
    def remap(self, features: Jagged, mutate_miss_lengths: bool = True) -> Jagged:
        """Return the features with rows in place of IDs."""

    @abstractmethod
    def evict(self) -> Tensor | None:
        """Return the rows whose IDs were evicted since the last call; None if there was no eviction."""

    @abstractmethod
    def output_size(self) -> int:
        """Return the number of rows."""

    @abstractmethod
    def input_size(self) -> int:
        """Return the end of the range of raw IDs."""

    @abstractmethod
    def buckets(self) -> int:
        """Return the number of parts that the rows can be cut into."""

    @abstractmethod
    def validate_state(self) -> None:
        """Check the state that was loaded."""

    @abstractmethod
    def open_slots(self) -> Tensor:
        """Return the number of rows that no ID has, int64 [1]."""

    def forward(self, features: Jagged, mutate_miss_lengths: bool = True) -> Jagged:
        """Record the features, and return them with rows in place of IDs."""
        return self.remap(self.profile(self.preprocess(features)), mutate_miss_lengths)


class MCHManagedCollisionModule(ManagedCollisionModule):
    """The IDs with the largest scores have a row of their own; all others share the last row.

    The rows change every ``eviction_interval`` iterations of training. The weights of a row stay when its ID
    changes, as TorchRec leaves them. The history holds 1.25 times the IDs of the first batch for each
    iteration of the interval; what does not fit is not counted, as in TorchRec, and a warning says so.

    Args:
        zch_size: the number of rows.
        device: the device of its state.
        eviction_policy: the policy that scores IDs.
        eviction_interval: the number of iterations between changes.
        input_hash_size: the end of the range of raw IDs, and the second argument of ``input_hash_func``.
        input_hash_func: maps raw IDs to those that are kept; None: they are kept as they are.
        mch_size: ignored, as in TorchRec.
        mch_hash_func: ignored, as in TorchRec.
        name: name of the module.
        output_global_offset: the first row.
        output_segments: see `ManagedCollisionModule`.
        buckets: see `buckets`.
    """

    _mch_sorted_raw_ids: Tensor
    _mch_remapped_ids_mapping: Tensor

    def __init__(
        self,
        zch_size: int,
        device: torch.device,
        eviction_policy: MCHEvictionPolicy,
        eviction_interval: int,
        input_hash_size: int = (2**63) - 1,
        input_hash_func: Hash | None = None,
        mch_size: int | None = None,
        mch_hash_func: Hash | None = None,
        name: str | None = None,
        output_global_offset: int = 0,
        output_segments: list[int] | None = None,
        buckets: int = 1,
    ) -> None:
        if zch_size < 1 or eviction_interval < 1:
            raise ValueError(
                f"zch_size and eviction_interval must be at least 1, got {zch_size} and {eviction_interval}."
            )
        end = output_global_offset + zch_size
        super().__init__(device, output_segments or [output_global_offset, end])
        if mch_size is not None or mch_hash_func is not None:
            _logger.warning("mch_size and mch_hash_func are ignored, as TorchRec ignores them")
        self._name, self._zch_size, self._offset = name, zch_size, output_global_offset
        self._input_hash_size, self._input_hash_func = input_hash_size, input_hash_func
        self._eviction_policy, self._eviction_interval = eviction_policy, eviction_interval
        self._buckets = buckets
        self._segments = self._output_segments_tensor.clone()
        self.register_buffer("_mch_sorted_raw_ids", torch.full((zch_size,), _EMPTY, device=device))
        self.register_buffer(
            "_mch_remapped_ids_mapping", torch.arange(output_global_offset, end, device=device)
        )
        for info in eviction_policy.metadata_info:
            if info.is_mch_metadata:
                zeros = torch.zeros(zch_size, dtype=torch.int64, device=device)
                self.register_buffer(f"_mch_{info.metadata_name}", zeros)
        self._history = _History(eviction_policy)
        self._current_iter = self._last_eviction_iter = -1
        self._evicted: Tensor | None = None

    @property
    def _metadata(self) -> dict[str, Tensor]:
        names = [info.metadata_name for info in self._eviction_policy.metadata_info if info.is_mch_metadata]
        return {name: self.get_buffer(f"_mch_{name}") for name in names}

    def preprocess(self, features: Jagged) -> Jagged:
        """Hash the IDs with ``input_hash_func``."""
        if self._input_hash_func is None:
            return features
        return {
            name: _with_values(each, self._input_hash_func(each.values(), self._input_hash_size))
            for name, each in features.items()
        }

    @torch.no_grad()
    def profile(self, features: Jagged) -> Jagged:
        """Record the features in training; admit and evict IDs when that is due."""
        if not self.training:
            return features
        if self._current_iter == -1:
            self._current_iter = self._last_eviction_iter = int(self._current_iter_tensor)
        self._current_iter += 1
        self._current_iter_tensor += 1
        values = torch.cat([each.values() for each in features.values()])
        self._history.record(values, self._current_iter, self._eviction_interval)
        if self._current_iter - self._last_eviction_iter == self._eviction_interval:
            self._update()
            self._last_eviction_iter = self._current_iter
        return features

    def _update(self) -> None:
        policy = self._eviction_policy
        ids, counts, metadata = self._history.take(self._current_iter)
        order = torch.argsort(counts, descending=True, stable=True)
        ids, counts = ids[order], counts[order]
        places, known = self._search(ids)
        gone, chosen = policy.update_metadata_and_generate_eviction_scores(
            self._current_iter,
            self._zch_size,
            order,
            counts,
            known,
            places[known],
            self._metadata,
            metadata,
        )
        self._mch_sorted_raw_ids[gone] = ids[~known][chosen]
        rows = self._mch_remapped_ids_mapping[gone]
        self._evicted = rows if self._evicted is None else torch.cat([self._evicted, rows]).unique()
        self._sort()

    def _sort(self) -> None:
        order = torch.argsort(self._mch_sorted_raw_ids, stable=True)
        for each in (self._mch_sorted_raw_ids, self._mch_remapped_ids_mapping, *self._metadata.values()):
            each.copy_(each[order])

    def _search(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return where each ID would be among those that are kept, and whether it is there."""
        places = torch.searchsorted(self._mch_sorted_raw_ids[:-1], ids)
        return places, self._mch_sorted_raw_ids[places] == ids

    def remap(self, features: Jagged, mutate_miss_lengths: bool = True) -> Jagged:
        """Return the features with rows in place of IDs; IDs without a row have the last one."""
        found = {}
        for name, each in features.items():
            places, known = self._search(each.values())
            rows = torch.where(
                known, self._mch_remapped_ids_mapping[places], self._offset + self._zch_size - 1
            )
            found[name] = _with_values(each, rows)
        return found

    def evict(self) -> Tensor | None:
        """Return the rows whose IDs were evicted since the last call; None if there was no eviction."""
        evicted, self._evicted = self._evicted, None
        return evicted

    def output_size(self) -> int:
        """Return the number of rows."""
        return self._zch_size

    def input_size(self) -> int:
        """Return the end of the range of raw IDs."""
        return self._input_hash_size

    def buckets(self) -> int:
        """Return the number of parts that the rows can be cut into."""
        return self._buckets

    def open_slots(self) -> Tensor:
        """Return the number of rows that no ID has, int64 [1]."""
        return self._zch_size - 1 - torch.searchsorted(self._mch_sorted_raw_ids, torch.tensor([_EMPTY]))

    def validate_state(self) -> None:
        """Raise ValueError if these rows cannot be cut out of those that were saved."""
        start, end = self._offset, self._offset + self._zch_size
        saved = self._output_segments_tensor
        if start not in saved or end not in saved:
            raise ValueError(
                f"rows [{start}, {end}) cannot be cut out of the segments {saved[saved >= 0].tolist()} that "
                "were saved. Load them into a module of the same zch_size."
            )
        self._output_segments_tensor.copy_(self._segments)
        self._sort()


class _History:
    """The IDs since the last eviction, as many as fit."""

    def __init__(self, policy: MCHEvictionPolicy) -> None:
        self._policy = policy
        self._names = [each.metadata_name for each in policy.metadata_info if each.is_history_metadata]
        self._size, self._is_cut = -1, False
        self._ids: list[Tensor] = []
        self._metadata: list[dict[str, Tensor]] = []

    def record(self, ids: Tensor, current_iter: int, interval: int) -> None:
        if self._size < 0:
            self._size = int(ids.numel() * interval * 1.25)
        free = self._size - sum(map(len, self._ids))
        if len(ids) > free and not self._is_cut:
            self._is_cut = True
            _logger.warning(
                "%d of a batch's %d IDs are not counted: the history has room for 1.25 times the first "
                "batch, as in TorchRec. Begin with a large batch, or take meshrec.Hashed, which counts all",
                len(ids) - free,
                len(ids),
            )
        ids = ids[:free].clone()
        metadata = {name: torch.zeros_like(ids) for name in self._names}
        self._policy.record_history_metadata(current_iter, ids, metadata)
        self._ids.append(ids)
        self._metadata.append(metadata)

    def take(self, current_iter: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the distinct IDs, their counts, and what the policy keeps of them; begin anew."""
        policy = self._policy
        ids, inverse, counts = torch.unique(torch.cat(self._ids), return_inverse=True, return_counts=True)
        history = {name: torch.cat([each[name] for each in self._metadata]) for name in self._names}
        func = policy._threshold_filtering_func
        mask = None if func is None else func(counts)[0]
        found = policy.coalesce_history_metadata(current_iter, history, counts, inverse, threshold_mask=mask)
        self._ids, self._metadata = [], []
        return (ids, counts, found) if mask is None else (ids[mask], counts[mask], found)


class ManagedCollisionCollection(nn.Module):
    """The managed collision modules of a collection's tables, by table.

    Args:
        managed_collision_modules: a module for each table.
        embedding_configs: the tables.
        need_preprocess: ignored; the modules preprocess.
    """

    def __init__(
        self,
        managed_collision_modules: dict[str, ManagedCollisionModule],
        embedding_configs: Sequence[BaseEmbeddingConfig],
        need_preprocess: bool = True,
    ) -> None:
        super().__init__()
        self._managed_collision_modules = nn.ModuleDict(managed_collision_modules)
        self._embedding_configs = embedding_configs
        self.need_preprocess = need_preprocess
        for config in embedding_configs:
            if config.name not in managed_collision_modules:
                raise ValueError(
                    f"Table {config.name} is not present in managed_collision_modules. Give each table one."
                )
            size = managed_collision_modules[config.name].output_size()
            if size != config.num_embeddings:
                raise ValueError(
                    f"table {config.name!r} has {config.num_embeddings} rows, and its managed collision "
                    f"module gives {size}. Give them the same number."
                )
        self._feature_names = [name for config in embedding_configs for name in config.feature_names]

    def embedding_configs(self) -> Sequence[BaseEmbeddingConfig]:
        """Return the tables."""
        return self._embedding_configs

    def table_to_number_buckets(self) -> dict[str, int]:
        """Return the number of buckets of each table's module."""
        return {name: each.buckets() for name, each in self._modules_by_table()}

    def _modules_by_table(self) -> list[tuple[str, ManagedCollisionModule]]:
        return list(self._managed_collision_modules.items())  # type: ignore[arg-type]

    def forward(self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True) -> KeyedJaggedTensor:
        """Return the features in the order of the tables, with rows in place of IDs."""
        keys = features.keys()
        if keys != self._feature_names:
            features = features.permute([keys.index(name) for name in self._feature_names])
        found = []
        splits = features.split([len(config.feature_names) for config in self._embedding_configs])
        for config, part in zip(self._embedding_configs, splits, strict=True):
            module = self._managed_collision_modules[config.name]
            # The weights are the number of IDs of each feature, as TorchRec's policies by feature read them.
            counts = torch.tensor(part.length_per_key())
            jagged = JaggedTensor(values=part.values(), lengths=part.lengths(), weights=counts)
            found.append(module({config.name: jagged}, mutate_miss_lengths)[config.name])
        return KeyedJaggedTensor(
            keys=features.keys(),
            values=torch.cat([each.values() for each in found]),
            lengths=torch.cat([each.lengths() for each in found]),
            weights=features.weights_or_none(),
        )

    def evict(self) -> dict[str, Tensor | None]:
        """Return the rows of each table whose IDs were evicted since the last call."""
        return {name: each.evict() for name, each in self._modules_by_table()}

    def open_slots(self) -> dict[str, Tensor]:
        """Return the number of rows of each table that no ID has."""
        return {name: each.open_slots() for name, each in self._modules_by_table()}


def _validate(module: ManagedCollisionModule, keys: object) -> None:
    module.validate_state()


def _with_values(jagged: JaggedTensor, values: Tensor) -> JaggedTensor:
    return JaggedTensor(values=values, lengths=jagged.lengths(), weights=jagged.weights_or_none())
