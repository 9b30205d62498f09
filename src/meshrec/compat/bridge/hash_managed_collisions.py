"""TorchRec's hash-based managed collisions (multi-probe ZCH), on MeshRec's hash index.

In TorchRec, an ID competes for the few rows that its hash probes, and the kernel trains on GPUs only. Here an
ID can take any row. So IDs get different rows than in TorchRec, and none is rejected while a row is free or
due for eviction.
"""

import time
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from meshrec.compat.bridge.managed_collisions import FixedRows, Jagged, ManagedCollisionModule, with_values
from meshrec.compat.bridge.sparse import JaggedTensor
from meshrec.ops.index import HashIndex, mix, unique

# Seconds per hour, the unit of TorchRec's times to live.
_SECONDS = 3600
# TorchRec's options without a counterpart, with the only value that changes nothing.
_NOT_HERE = {
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
    """Names of eviction policies."""

    SINGLE_TTL_EVICTION = "SINGLE_TTL_EVICTION"
    """Evict IDs without a read for ``single_ttl`` hours."""
    PER_FEATURE_TTL_EVICTION = "PER_FEATURE_TTL_EVICTION"
    """Evict IDs without a read for the TTL of their feature, in hours."""
    LRU_EVICTION = "LRU_EVICTION"
    """Evict the least recently read IDs."""


@dataclass
class HashZchEvictionConfig:
    """Options of an eviction policy.

    Attributes:
        features: features of the table.
        single_ttl: time to live (TTL) for the IDs of all features: hours without a read after which an ID may
            be evicted.
        per_feature_ttl: time to live in hours for the IDs of every feature, in the order of ``features``.
    """

    features: list[str]
    single_ttl: int | None = None
    per_feature_ttl: list[int] | None = None


class HashZchManagedCollisionModule(FixedRows, ManagedCollisionModule):
    """Managed collisions with a dedicated row per ID while rows last. Remaining IDs share rows by hash.

    In training, a new ID takes a free row, or the row with the earliest expiry among the rows that the policy
    allows to evict. The clock counts whole hours, as in TorchRec.

    Args:
        zch_size: number of rows.
        device: device for the state; must be the CPU.
        total_num_buckets: number of equal row ranges; must divide ``zch_size``.
        max_probe: ignored, because IDs are not limited to probed rows.
        input_hash_size: exclusive upper limit for raw IDs; 0: all int64 values.
        output_segments: see ``ManagedCollisionModule``.
        name: module name.
        eviction_policy_name: policy; None: IDs are never evicted.
        eviction_config: policy options.
        disable_fallback: whether to drop IDs without a row instead of sharing rows.
        read_only_suffix: suffix for read-only features.
        persist_hash_zch_bucket: whether the state dict contains the bucket count.
        is_inference: whether the ID-to-row mapping is frozen, even in training mode.
        more: other TorchRec options, which must keep their defaults.

    Raises:
        ValueError: an option is not supported, or the policy lacks a TTL.
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
        is_inference: bool = False,
        **more: Any,
    ) -> None:
        _check_ignored_options(more)
        if zch_size < 1 or total_num_buckets < 1 or zch_size % total_num_buckets:
            raise ValueError(
                f"zch_size must be a multiple of total_num_buckets, got {zch_size} and {total_num_buckets}."
            )
        share = zch_size // total_num_buckets
        segments = output_segments or [share * bucket for bucket in range(total_num_buckets + 1)]
        super().__init__(device, segments, read_only_suffix=read_only_suffix)
        self._name, self._zch_size, self._input_hash_size = name, zch_size, input_hash_size
        self._buckets = total_num_buckets
        self._disable_fallback, self._policy = disable_fallback, eviction_policy_name
        self._hours = _hours_of(eviction_policy_name, eviction_config)
        # ID per row (-1: free) and expiry hour per row. Names and shapes are TorchRec's, so checkpoints load.
        self.register_buffer("_hash_zch_identities", torch.full((zch_size, 1), -1, device=device))
        self.register_buffer("_hash_zch_metadata", torch.zeros(zch_size, 1, dtype=torch.int32, device=device))
        # -1 is also a valid raw ID, so a separate mask says which rows are taken.
        self.register_buffer("_hash_zch_used", torch.zeros(zch_size, dtype=torch.bool, device=device))
        self.register_buffer(
            "_hash_zch_bucket", torch.tensor([[total_num_buckets]]), persistent=persist_hash_zch_bucket
        )
        self._hash_zch_runtime_meta: Tensor | None = None  # counters that only TorchRec's kernel writes
        # Derived from the buffers, not saved. validate_state rebuilds it after a state dict is loaded.
        self._index = HashIndex(zch_size, name=f"managed collisions {name or ''}")
        # Evicted rows since the last evict(), which takes and clears them.
        self._evicted: list[Tensor] = []
        self._is_inference = is_inference

    @property
    def is_sharded(self) -> bool:
        """False: the module holds all rows."""
        return False

    def reset_inference_mode(self) -> None:
        """Freeze the ID-to-row mapping, even in training mode."""
        self._is_inference = True

    def preprocess(self, features: Jagged) -> Jagged:
        return features

    def profile(self, features: Jagged) -> Jagged:
        """Return the features unchanged; ``remap`` records them."""
        return features

    @torch.no_grad()
    def remap(self, features: Jagged, mutate_miss_lengths: bool = True) -> Jagged:
        remapped = {}
        for name, bags in features.items():
            ids = bags.values().long()
            if self.training and not self._is_inference and not name.lower().endswith(self.read_only_suffix):
                self._train(ids, bags)
            rows = self._index.find(ids)
            if not self._disable_fallback:
                # The seed is fixed: shared rows must not change between runs or after a reload.
                shared = mix(ids, 0) % self._zch_size
                remapped[name] = with_values(bags, torch.where(rows < 0, shared, rows))
                continue
            hits = rows >= 0
            lengths = bags.lengths()
            if mutate_miss_lengths:
                samples = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
                lengths = torch.zeros_like(lengths).index_add_(0, samples, hits.to(lengths.dtype))
            weights = bags.weights_or_none()
            if weights is not None and len(weights) == len(hits):
                weights = weights[hits]
            remapped[name] = JaggedTensor(values=rows[hits], lengths=lengths, weights=weights)
        return remapped

    def retained_mask(self, features: Jagged) -> Tensor | None:
        if not self._disable_fallback:
            return None
        return torch.cat([self._index.find(bags.values().long()) >= 0 for bags in features.values()])

    def _train(self, ids: Tensor, feature: JaggedTensor) -> None:
        """Assign rows to new IDs, and renew the expiry hours of all IDs with a row.

        If there are too few free rows, IDs outside this batch are evicted as the policy allows. New IDs for
        which there is still no row stay without a row until a later batch.

        Args:
            ids: raw IDs, int64 [N]; may repeat.
            feature: bags with these IDs. With ``per_feature_ttl``, the weights are the ID counts per
                feature.
        """
        distinct, inverse = unique(ids)
        expiry_hours = torch.zeros_like(distinct)
        # An ID may occur in several features with different TTLs: the latest expiry counts.
        expiry_hours.scatter_reduce_(0, inverse, self._expiry_hours(ids, feature), "amax", include_self=False)
        rows = self._index.find(distinct)
        present, new = rows[rows >= 0], distinct[rows < 0]
        num_free = self._zch_size - self._index.num_live
        if len(new) > num_free:
            # The IDs of this batch are about to be read, so their rows are excluded from eviction.
            num_free += self._make_room(len(new) - num_free, present)
        # The remaining IDs share rows by hash, or are dropped, until a later batch finds room.
        new = new[:num_free]
        if len(new):
            # Free rows suffice, because `new` was cut to their number.
            slots = self._index.insert(new)
            self._hash_zch_identities[slots, 0] = new
            self._hash_zch_used[slots] = True
        rows = self._index.find(distinct)
        has_row = rows >= 0
        self._hash_zch_metadata[rows[has_row], 0] = expiry_hours[has_row].int()

    def _expiry_hours(self, ids: Tensor, feature: JaggedTensor) -> Tensor:
        """Return the expiry hour per ID, [N]; see ``_train`` for the arguments."""
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

    def _make_room(self, num_rows: int, keep: Tensor) -> int:
        """Evict IDs that the policy allows to evict, those with the earliest expiry first.

        Returns:
            Number of freed rows.
        """
        if self._policy is None:
            return 0
        due = self._hash_zch_used.clone()
        due[keep] = False
        expiry_hours = self._hash_zch_metadata[:, 0].long()
        if self._policy is not HashZchEvictionPolicyName.LRU_EVICTION:
            due &= expiry_hours < _now()
        rows = due.nonzero()[:, 0]
        # Earliest expiry first. For LRU every row is a candidate, so this is the least recently read.
        rows = rows[expiry_hours[rows].argsort(stable=True)][:num_rows]
        self._index.remove(self._hash_zch_identities[rows, 0])
        self._hash_zch_used[rows] = False
        self._hash_zch_identities[rows] = -1
        if len(rows):
            self._evicted.append(rows)
        return len(rows)

    def evict(self) -> Tensor | None:
        evicted, self._evicted = self._evicted, []
        return torch.cat(evicted).unique() if evicted else None

    def open_slots(self) -> Tensor:
        return torch.tensor([self._zch_size - self._index.num_live])

    def validate_state(self) -> None:
        slots = self._hash_zch_used.nonzero()[:, 0]
        # HashIndex.of needs ascending IDs.
        ids, order = self._hash_zch_identities[slots, 0].sort()
        self._index = HashIndex.of(self._zch_size, ids, slots[order], name=self._index.name)


def make_hash_zch_buckets_non_persistent(module: torch.nn.Module) -> int:
    """Exclude the bucket count from all state dicts inside ``module``, because older checkpoints lack it.

    Returns:
        Number of changed modules.
    """
    buffer = "_hash_zch_bucket"
    holders = [
        child
        for child in module.modules()
        if buffer in child._buffers and buffer not in child._non_persistent_buffers_set
    ]
    # As `register_buffer(persistent=False)` does for new buffers.
    for child in holders:
        child._non_persistent_buffers_set.add(buffer)
    return len(holders)


def _check_ignored_options(options: dict[str, Any]) -> None:
    """Check that TorchRec options without a counterpart in MeshRec have their default values."""
    for option, value in options.items():
        if option not in _NOT_HERE:
            raise TypeError(f"HashZchManagedCollisionModule has no argument {option!r}. Leave it out.")
        if value != _NOT_HERE[option]:
            raise ValueError(
                f"MeshRec's HashZchManagedCollisionModule has no {option}, got {value!r}. Leave it out: "
                "tables with hashed keys (meshrec.Hashed) have admission, counts and every plan."
            )


def _hours_of(policy: HashZchEvictionPolicyName | None, config: HashZchEvictionConfig | None) -> list[int]:
    """Return the time to live in hours, as a list with a value per feature, or with one value for all.

    Without a policy, the value is 0.
    """
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
    """Return the current time in whole hours."""
    return int(time.time() / _SECONDS)
