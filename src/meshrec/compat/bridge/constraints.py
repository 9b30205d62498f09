"""TorchRec's ``ParameterConstraints``. Every field is either honored or rejected with advice."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from meshrec.compat.bridge.plans import raises_on_invalid_ids
from meshrec.plan.sharding_plan import EmbeddingComputeKernel
from meshrec.planner import types

# Kernels of which `compute_kernels` must name at least one.
_KERNELS = [kernel.value for kernel in EmbeddingComputeKernel]
# Options without an effect here, and the reason. Ignoring them in silence would hide a wrong plan.
_REFUSED = {
    "cache_params": "tables are not cached",
    "enforce_hbm": "tables are not cached, so that all rows are where the table is",
    "bounds_check_mode": "collections check their IDs by their own option bounds_check=BoundsCheckMode",
    "key_value_params": "tables are in memory",
}


@dataclass
class ParameterConstraints:
    """TorchRec's planner constraints and workload assumptions for one table.

    Attributes:
        sharding_types: names of allowed sharding types; None: all.
        compute_kernels: ``dense`` gives ordinary gradients, ``fused`` updates in backward; None: the
            sharder's kernels.
        min_partition: minimum columns per column-wise shard; None: 32.
        pooling_factors: expected IDs per bag, by feature.
        num_poolings: expected lookups per sample, by feature.
        batch_sizes: samples per batch, by feature.
        is_weighted, feature_names: must agree with the module.
        stochastic_rounding, output_dtype, device_group: must match MeshRec's behavior.
        bounds_check_mode: must be None or FATAL.
        cache_params, enforce_hbm, key_value_params, use_virtual_table: must keep their defaults.

    Raises:
        ValueError: a kernel or option is not supported.
    """

    sharding_types: Sequence[str] | None = None
    compute_kernels: Sequence[str] | None = None
    min_partition: int | None = None
    pooling_factors: Sequence[float] = field(default_factory=lambda: [1.0])
    num_poolings: Sequence[float] | None = None
    batch_sizes: Sequence[int] | None = None
    is_weighted: bool = False
    cache_params: object | None = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: object | None = None
    feature_names: Sequence[str] | None = None
    output_dtype: Any = None
    device_group: str | None = None
    key_value_params: object | None = None
    use_virtual_table: bool = False

    def __post_init__(self) -> None:
        self.check()

    # Fields hold lists, which cannot be hashed, so this hashes their reprs.
    def __hash__(self) -> int:
        return hash(tuple(repr(getattr(self, option.name)) for option in fields(self)))

    @property
    def kernels(self) -> list[str] | None:
        """Names of allowed kernels; None: all."""
        if not self.compute_kernels:
            return None
        return [str(getattr(kernel, "value", kernel)) for kernel in self.compute_kernels]

    def check(self) -> None:
        """Raise ValueError if a kernel or an option has no equivalent in MeshRec."""
        kernels = self.kernels
        # A single supported kernel is enough: the list may also name FBGEMM kernels that MeshRec lacks.
        if kernels is not None and not set(kernels) & set(_KERNELS):
            raise ValueError(
                f"MeshRec has the compute kernels {_KERNELS}, got {kernels}. Leave compute_kernels out."
            )
        for name, reason in _REFUSED.items():
            value = getattr(self, name)
            if value is not None and not (name == "bounds_check_mode" and raises_on_invalid_ids(value)):
                raise ValueError(f"MeshRec's planner has no constraint {name}: {reason}. Leave {name} out.")
        if self.use_virtual_table:
            raise ValueError(
                "use_virtual_table: constraints make no table virtual. Give the table's config "
                "use_virtual_table=True instead; it becomes a hashed table."
            )
        if self.stochastic_rounding is False:
            raise ValueError(
                "stochastic_rounding=False: updates of fp16 and bf16 tables are always rounded "
                "stochastically here. Leave it out, or keep such tables in fp32."
            )
        dtype = getattr(self.output_dtype, "name", self.output_dtype)
        if dtype not in (None, "FP32"):
            raise ValueError(
                f"output_dtype {dtype}: a sharded collection gives fp32 here. Leave it out, or convert the "
                "result."
            )

    def to_core(self, table: str, *, device: str, features: Sequence[str], is_weighted: bool) -> Any:
        """Convert to MeshRec's constraints for one table.

        Args:
            table: table name, for error messages.
            device: the topology's compute device, ``"cpu"`` or ``"cuda"``.
            features: the table's features, in config order.
            is_weighted: whether the collection takes per-sample weights.

        Raises:
            ValueError: the constraints contradict the module or the topology.
        """
        self.check()
        if self.is_weighted and not is_weighted:
            raise ValueError(
                f"table {table!r}: its constraints say is_weighted, but its collection is not. Make the "
                "collection with is_weighted=True, or leave it out of the constraints."
            )
        if self.feature_names is not None and list(self.feature_names) != list(features):
            raise ValueError(
                f"table {table!r}: its constraints name the features {list(self.feature_names)}, its config "
                f"{list(features)}. Leave feature_names out of the constraints."
            )
        if self.device_group not in (None, device):
            raise ValueError(
                f"table {table!r}: device_group is {self.device_group!r}, but the topology is for {device}. "
                "All tables of a model are on one kind of device: leave it out."
            )
        return types.ParameterConstraints(
            sharding_types=self.sharding_types,
            min_partition=self.min_partition,
            # [1.0] is TorchRec's default, not an estimate. None lets MeshRec's planner use its own.
            pooling_factors=None if list(self.pooling_factors) == [1.0] else list(self.pooling_factors),
            num_poolings=self.num_poolings,
            batch_sizes=self.batch_sizes,
        )
