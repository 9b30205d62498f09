"""TorchRec's ``ParameterConstraints``. Every field is followed, or refused with advice."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from meshrec.plan.sharding_plan import EmbeddingComputeKernel
from meshrec.planner import types

_KERNELS = [kernel.value for kernel in EmbeddingComputeKernel]
_REFUSED = {
    "cache_params": "tables are not cached",
    "enforce_hbm": "tables are not cached, so that all rows are where the table is",
    "bounds_check_mode": "collections check their IDs by their own option bounds_check=BoundsCheckMode",
    "key_value_params": "tables are in memory",
}


@dataclass
class ParameterConstraints:
    """TorchRec's constraints and assumptions of the planner for one table.

    Attributes:
        sharding_types: names of the allowed sharding types; None: all.
        compute_kernels: ``dense`` gives ordinary gradients, ``fused`` updates in the backward pass; None: the
            sharder's kernels.
        min_partition: smallest number of columns of a column shard; None: 32.
        pooling_factors, num_poolings, batch_sizes: one value for each feature of the table.
        is_weighted, feature_names: must agree with the module.
        stochastic_rounding, output_dtype, device_group: must ask for MeshRec's behaviour.
        cache_params, enforce_hbm, bounds_check_mode, key_value_params, use_virtual_table: must be left out.

    Raises:
        ValueError: MeshRec lacks the kernel or the option.
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

    def __hash__(self) -> int:
        return hash(tuple(repr(getattr(self, each.name)) for each in fields(self)))

    @property
    def kernels(self) -> list[str] | None:
        """Names of the allowed kernels; None: all."""
        if not self.compute_kernels:
            return None
        return [str(getattr(kernel, "value", kernel)) for kernel in self.compute_kernels]

    def check(self) -> None:
        """Raise ValueError for a kernel or an option that MeshRec lacks."""
        kernels = self.kernels
        if kernels is not None and not set(kernels) & set(_KERNELS):
            raise ValueError(
                f"MeshRec has the compute kernels {_KERNELS}, got {kernels}. Leave compute_kernels out."
            )
        for name, reason in _REFUSED.items():
            if getattr(self, name) is not None:
                raise ValueError(f"MeshRec's planner has no constraint {name}: {reason}. Leave {name} out.")
        if self.use_virtual_table:
            raise ValueError("MeshRec has no virtual tables. Leave use_virtual_table out.")
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

    def to_own(self, table: str, *, device: str, features: Sequence[str], is_weighted: bool) -> Any:
        """Return MeshRec's constraints of a table with these features.

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
            pooling_factors=None if list(self.pooling_factors) == [1.0] else list(self.pooling_factors),
            num_poolings=self.num_poolings,
            batch_sizes=self.batch_sizes,
        )
