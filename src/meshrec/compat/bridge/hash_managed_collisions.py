"""TorchRec's hash-based managed collisions (multi-probe ZCH), on MeshRec's hash index.

TorchRec's kernel trains on GPUs only, and an ID competes for the rows that its hash probes. Here any ID can
have any row. So IDs get other rows than in TorchRec, and no ID loses its row as long as a row is free or due
for eviction.
"""

import time
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from meshrec.compat.bridge.managed_collisions import Jagged, ManagedCollisionModule
from meshrec.compat.bridge.sparse import JaggedTensor
from meshrec.ops.index import HashIndex, mix, unique

_SECONDS = 3600
_NOT_HERE = {
    "is_inference": False,
    "tb_logging_frequency": 0,
    "inference_dispatch_div_train_world_size": False,
    "start_bucket": 0,
    "end_bucket": None,
    "opt_in_prob": -1,
    "percent_reserved_slots": 0,
    "track_id_freq": False,
    "enable_per_feature_lookups": False,
    "no_bag": False,
    "write_runtime_meta_dim": 0,
}


class HashZchEvictionPolicyName(Enum):
    """The policies that choose which IDs lose their rows."""

    SINGLE_TTL_EVICTION = "SINGLE_TTL_EVICTION"
    """Evicts IDs that were not read for ``single_ttl`` hours."""
    PER_FEATURE_TTL_EVICTION = "PER_FEATURE_TTL_EVICTION"
    """Evicts IDs that were not read for the hours of their feature."""
    LRU_EVICTION = "LRU_EVICTION"
    """Evicts the IDs whose last read is the longest ago."""


@dataclass
class HashZchEvictionConfig:
    """The options of a policy.

    Attributes:
        features: the features of the table.
        single_ttl: hours without a read.
        per_feature_ttl: the same for each feature.
    """

    features: list[str]
    single_ttl: int | None = None
    per_feature_ttl: list[int] | None = None


class HashZchManagedCollisionModule(ManagedCollisionModule):
    """Each ID has a row of its own, as long as there are rows; the others share rows by their hash.

    In training, a new ID takes a free row, or one whose ID is due under the eviction policy, the longest due
    first. The clock is in hours, as TorchRec's.

    Args:
        zch_size: the number of rows.
        device: the device, the CPU.
        total_num_buckets: the number of parts that the rows can be cut into; must divide ``zch_size``.
        max_probe: accepted, and without effect: no ID is refused a row that is free.
        input_hash_size: the end of the range of raw IDs; 0: all of int64.
        output_segments: see ``ManagedCollisionModule``.
        name: name of the module.
        eviction_policy_name: the policy; None: no ID loses its row.
        eviction_config: the options of the policy.
        disable_fallback: whether IDs without a row are left out, instead of sharing one.
        read_only_suffix: suffix of the names of features that never change the rows.
        persist_hash_zch_bucket: whether the state dict has the number of buckets.
        more: further options of TorchRec, which must have their defaults.

    Raises:
        ValueError: an option is not supported, or the policy lacks its hours.
    """

    _hash_zch_identities: Tensor
    _hash_zch_metadata: Tensor
    _hash_zch_used: Tensor

    def __init__(
        self,
        zch_size: int,
        device: torch.device,
        total_num_buckets: int,
        max_probe: int = 128,
        input_hash_size: int = 0,
        *,
        output_segments: list[int] | None = None,
        name: str | None = None,
        eviction_policy_name: HashZchEvictionPolicyName | None = None,
        eviction_config: HashZchEvictionConfig | None = None,
        disable_fallback: bool = False,
        read_only_suffix: str = "_readonly",
        persist_hash_zch_bucket: bool = True,
        **more: Any,
    ) -> None:
        _check_options(more)
        if zch_size < 1 or total_num_buckets < 1 or zch_size % total_num_buckets:
            raise ValueError(
                f"zch_size must be a multiple of total_num_buckets, got {zch_size} and {total_num_buckets}."
            )
        share = zch_size // total_num_buckets
        super().__init__(device, output_segments or [share * b for b in range(total_num_buckets + 1)])
        self._name, self._zch_size, self._input_hash_size = name, zch_size, input_hash_size
        self._buckets, self._suffix = total_num_buckets, read_only_suffix
        self._disable_fallback, self._policy = disable_fallback, eviction_policy_name
        self._hours = _hours_of(eviction_policy_name, eviction_config)
        # IDs and the hours until which their rows are theirs.
        self.register_buffer("_hash_zch_identities", torch.full((zch_size, 1), -1, device=device))
        self.register_buffer("_hash_zch_metadata", torch.zeros(zch_size, 1, dtype=torch.int32, device=device))
        self.register_buffer("_hash_zch_used", torch.zeros(zch_size, dtype=torch.bool, device=device))
        self.register_buffer(
            "_hash_zch_bucket", torch.tensor([[total_num_buckets]]), persistent=persist_hash_zch_bucket
        )
        self._index = HashIndex(zch_size, name=f"managed collisions {name or ''}")
        self._evicted: list[Tensor] = []

    def preprocess(self, features: Jagged) -> Jagged:
        """Return the features."""
        return features

    def profile(self, features: Jagged) -> Jagged:
        """Return the features: ``remap`` records them."""
        return features

    @torch.no_grad()
    def remap(self, features: Jagged, mutate_miss_lengths: bool = True) -> Jagged:
        """Return the features with rows in place of IDs; in training, new IDs get rows."""
        found = {}
        for name, each in features.items():
            ids = each.values().long()
            if self.training and not name.lower().endswith(self._suffix):
                self._train(ids, each)
            rows = self._index.find(ids)
            if not self._disable_fallback:
                shared = mix(ids, 0) % self._zch_size
                found[name] = _with(each, torch.where(rows < 0, shared, rows), each.lengths())
                continue
            hits = rows >= 0
            lengths = each.lengths()
            if mutate_miss_lengths:
                bags = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
                lengths = torch.zeros_like(lengths).index_add_(0, bags, hits.to(lengths.dtype))
            found[name] = _with(each, rows[hits], lengths, hits)
        return found

    def _train(self, ids: Tensor, feature: JaggedTensor) -> None:
        """Assign rows to new IDs, and record the hour until which each ID of the batch keeps its row."""
        distinct, inverse = unique(ids)
        until = torch.zeros_like(distinct)
        until.scatter_reduce_(0, inverse, self._until(ids, feature), "amax", include_self=False)
        rows = self._index.find(distinct)
        known, new = rows[rows >= 0], distinct[rows < 0]
        num_free = self._zch_size - self._index.num_live
        if len(new) > num_free:
            num_free += self._make_room(len(new) - num_free, known)
        new = new[:num_free]
        if len(new):
            slots = self._index.insert(new)
            self._hash_zch_identities[slots, 0] = new
            self._hash_zch_used[slots] = True
        rows = self._index.find(distinct)
        own = rows >= 0
        self._hash_zch_metadata[rows[own], 0] = until[own].int()

    def _until(self, ids: Tensor, feature: JaggedTensor) -> Tensor:
        """Return the hour until which each ID keeps its row."""
        now = _now()
        if len(self._hours) == 1:
            return torch.full_like(ids, now + self._hours[0])
        # As TorchRec's collections give it: the number of IDs of each feature.
        counts = feature.weights().long()
        if len(counts) != len(self._hours):
            raise ValueError(
                f"per_feature_ttl has {len(self._hours)} features, and the weights of the input, which must "
                f"be their numbers of IDs, {len(counts)}."
            )
        return torch.tensor(self._hours).repeat_interleave(counts) + now

    def _make_room(self, wanted: int, keep: Tensor) -> int:
        """Evict IDs that are due, except those to ``keep``; return the number of freed rows."""
        if self._policy is None:
            return 0
        due = self._hash_zch_used.clone()
        due[keep] = False
        until = self._hash_zch_metadata[:, 0].long()
        if self._policy is not HashZchEvictionPolicyName.LRU_EVICTION:
            due &= until < _now()
        rows = due.nonzero()[:, 0]
        rows = rows[until[rows].argsort(stable=True)][:wanted]
        self._index.remove(self._hash_zch_identities[rows, 0])
        self._hash_zch_used[rows] = False
        self._hash_zch_identities[rows] = -1
        if len(rows):
            self._evicted.append(rows)
        return len(rows)

    def evict(self) -> Tensor | None:
        """Return the rows whose IDs were evicted since the last call; None if there was no eviction."""
        evicted, self._evicted = self._evicted, []
        return torch.cat(evicted).unique() if evicted else None

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
        return torch.tensor([self._zch_size - self._index.num_live])

    def validate_state(self) -> None:
        """Make the index of the IDs that were loaded."""
        slots = self._hash_zch_used.nonzero()[:, 0]
        ids, order = self._hash_zch_identities[slots, 0].sort()
        self._index = HashIndex.of(self._zch_size, ids, slots[order], name=self._index.name)


def _check_options(more: dict[str, Any]) -> None:
    for option, value in more.items():
        if option not in _NOT_HERE:
            raise TypeError(f"HashZchManagedCollisionModule has no argument {option!r}. Leave it out.")
        if value != _NOT_HERE[option]:
            raise ValueError(
                f"MeshRec's HashZchManagedCollisionModule has no {option}, got {value!r}. Leave it out: "
                "tables with hashed keys (meshrec.Hashed) have admission, counts and every plan."
            )


def _hours_of(policy: HashZchEvictionPolicyName | None, config: HashZchEvictionConfig | None) -> list[int]:
    """Return the hours of each feature, or of all of them."""
    if policy is None:
        return [0]
    if policy is HashZchEvictionPolicyName.PER_FEATURE_TTL_EVICTION:
        hours = config.per_feature_ttl if config is not None else None
        if config is None or hours is None or len(hours) != len(config.features):
            raise ValueError(f"{policy.value} needs eviction_config with per_feature_ttl for each feature.")
        return list(hours)
    if config is None or config.single_ttl is None:
        raise ValueError(f"{policy.value} needs eviction_config with single_ttl.")
    return [config.single_ttl]


def _now() -> int:
    return int(time.time() / _SECONDS)


def _with(jagged: JaggedTensor, values: Tensor, lengths: Tensor, hits: Tensor | None = None) -> JaggedTensor:
    weights = jagged.weights_or_none()
    if hits is not None and weights is not None and len(weights) == len(hits):
        weights = weights[hits]
    return JaggedTensor(values=values, lengths=lengths, weights=weights)
