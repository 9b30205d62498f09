"""Planner input: tables, machine, and constraints.

Arrays in this package are named by the index they have per axis, see [Note: planner arrays] in
``problem.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from meshrec.comms.wire import FULL_PRECISION, AcrossNodes, WireFormats
from meshrec.ops.tbe.formulas import OptimizerKind as OptimizerKind  # tables name their optimizer by it
from meshrec.plan.sharding_plan import ShardingType
from meshrec.planner.hardware import Disk, HardwareProfile, get_profile, with_memory

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

STATE_BYTES = 4
"""Bytes per optimizer state value (fp32)."""
DEFAULT_MIN_PARTITION = 32
"""Minimum columns per column shard, unless `ParameterConstraints.min_partition` says otherwise."""
# Column shards start at multiples of 4, the width of a 16-byte vector load.
COLUMN_ALIGNMENT = 4


@dataclass(frozen=True, kw_only=True)
class Table:
    """Sizes and lookup statistics of an embedding table, from which the cost model predicts time and memory.

    Attributes:
        name: unique name: the table's name in its module, or ``module_path.name`` if several modules use that
            name.
        num_embeddings: row count.
        embedding_dim: column count.
        pooling_factors: mean IDs per bag, for each feature that looks up the table.
        num_poolings: bags per sample, for each feature; None: 1.
        weight_bytes: bytes per weight; below 1 if several quantized weights share a byte.
        row_bytes: bytes stored per row in addition to the weights, such as a quantization scale. A table
            split by columns stores them once in every column shard.
        index_bytes: bytes per row for the hash index, admission and eviction of a hashed table, also stored
            in every column shard. 0: the table is not hashed, and IDs are row numbers.
        trained: whether the table has a backward pass and an update; otherwise only forward phases cost time.
        pooled: whether the lookup returns a row per bag; otherwise it returns a row per ID.
        weighted: whether IDs have per-sample weights (4 bytes each).
        optimizer: fused optimizer, which determines the state bytes per row.
        effective_rows: measure of skew: the count of equally likely rows that would give as many distinct
            rows per batch as the actual lookups. Below num_embeddings if a few rows are hot. None: no skew.
        batch_size: samples per rank for the table's features; None: the batch size given to the planner.
        module_path: path to the module with the table, as in ``model.named_modules()``.
        wire: formats in which embeddings and gradients are sent between ranks.
        in_memory: fraction of the table's bytes in memory; the remaining bytes are in a file.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    pooling_factors: tuple[float, ...] = (1.0,)
    num_poolings: tuple[float, ...] | None = None
    weight_bytes: float = 4
    row_bytes: float = 0
    index_bytes: float = 0
    trained: bool = True
    pooled: bool = True
    weighted: bool = False
    optimizer: OptimizerKind = OptimizerKind.ROW_WISE_ADAGRAD
    effective_rows: float | None = None
    batch_size: int | None = None
    module_path: str = ""
    wire: WireFormats = FULL_PRECISION
    in_memory: float = 1.0

    def __post_init__(self) -> None:
        if self.num_embeddings < 1 or self.embedding_dim < 1:
            raise ValueError(
                f"table {self.name!r}: {self.num_embeddings} rows x {self.embedding_dim} columns; both "
                f"must be >= 1."
            )
        if not self.pooling_factors or any(not factor >= 0 for factor in self.pooling_factors):
            raise ValueError(
                f"table {self.name!r}: pooling_factors {self.pooling_factors}; give one number >= 0 per "
                f"feature."
            )
        if self.num_poolings is not None and len(self.num_poolings) != len(self.pooling_factors):
            raise ValueError(
                f"table {self.name!r}: {len(self.num_poolings)} num_poolings for {len(self.pooling_factors)} "
                "pooling_factors; both have one number per feature."
            )

    @property
    def local_name(self) -> str:
        """Name of the table within its module, without the module path."""
        return self.name.rpartition(".")[2] if self.module_path else self.name

    @property
    def bags_per_sample(self) -> float:
        """Mean bags per sample, summed over the table's features."""
        return float(sum(self.num_poolings)) if self.num_poolings else float(len(self.pooling_factors))

    @property
    def ids_per_sample(self) -> float:
        """Mean IDs per sample, summed over the table's features."""
        poolings = self.num_poolings or (1.0,) * len(self.pooling_factors)
        return float(sum(f * n for f, n in zip(self.pooling_factors, poolings, strict=True)))

    @property
    def num_bytes(self) -> int:
        """Bytes of the unsplit table: weights, optimizer state and hash index."""
        per_column, per_row = self.optimizer.state_per_row
        values = self.embedding_dim * self.weight_bytes + self.row_bytes + self.index_bytes
        row = values + STATE_BYTES * (self.embedding_dim * per_column + per_row)
        return round(self.num_embeddings * row)


@dataclass(frozen=True, kw_only=True)
class ParameterConstraints:
    """User constraints on a table's placement, and assumptions about the lookups.

    None leaves a choice to the planner.

    Attributes:
        sharding_types: allowed sharding types.
        min_partition: minimum columns per column shard (default 32).
        pooling_factors: see `Table` (default: 1 ID per bag).
        num_poolings: see `Table`.
        batch_sizes: samples per rank, for each feature; the planner uses the mean.
        ranks: ranks that may hold shards of the table.
        effective_rows: see `Table`.
        all_ranks: if the table is split by rows, split it over every rank; otherwise the planner selects how
            many ranks to use.
    """

    sharding_types: Sequence[ShardingType | str] | None = None
    min_partition: int | None = None
    pooling_factors: Sequence[float] | None = None
    num_poolings: Sequence[float] | None = None
    batch_sizes: Sequence[int] | None = None
    ranks: Sequence[int] | None = None
    effective_rows: float | None = None
    all_ranks: bool = False

    def __post_init__(self) -> None:
        if self.all_ranks and self.ranks is not None:
            raise ValueError(f"all_ranks conflicts with ranks={list(self.ranks)}. Give one of them.")
        if self.sharding_types is not None:
            allowed = [kind.value for kind in ShardingType]
            for kind in self.sharding_types:
                if not isinstance(kind, ShardingType) and kind not in allowed:
                    raise ValueError(f"sharding type {kind!r} is unknown; allowed are {allowed}.")
        if self.min_partition is not None and self.min_partition < 1:
            raise ValueError(f"min_partition is {self.min_partition}; it must be at least 1 column.")

    @property
    def allowed_types(self) -> frozenset[ShardingType]:
        """Allowed sharding types as a set; all types if the user named none."""
        if self.sharding_types is None:
            return frozenset(ShardingType)
        return frozenset(ShardingType(kind) for kind in self.sharding_types)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The machine to plan for: ranks and nodes, and the speed and memory of a rank.

    Attributes:
        world_size: rank count.
        compute_device: ``cpu`` or ``cuda``; selects the default profile and the applicable memory cap.
        local_world_size: ranks per node (default: all; on cuda at most 8).
        hbm_cap: memory bytes per rank on cuda (default: the profile's).
        ddr_cap: memory bytes per rank on cpu (default: the profile's).
        hardware: `HardwareProfile` or profile name (default: ``h100`` on cuda, ``cpu`` on cpu).
        intra_host_bandwidth: bytes/s within a node (default: the profile's).
        inter_host_bandwidth: bytes/s between nodes (default: the profile's).
        reserve: fraction of the memory which tables and buffers must leave free.
        dense_bytes: bytes per rank of the dense model: parameters, gradients, optimizer state, activations.
        replicate: ``replicate`` axis sizes among which the planner selects; 1 means no replication.
        sum_in_node: whether the partial sums of a pooled row are added within a node before they cross the
            network. The mesh then has the axes ``node`` and ``local``.
        across_nodes: sharder option, see ``EmbeddingBagCollectionSharder``: ``"sums"`` sends pooled sums
            between nodes, ``"rows"`` sends every distinct row once per node.
        packed_ids: whether IDs sent between nodes are bit-packed, as the log of a run with ``"rows"`` states.
        disk: disk per node, for table files; see ``planner.disk.place_rows``.
    """

    world_size: int
    compute_device: str = "cuda"
    local_world_size: int | None = None
    hbm_cap: int | None = None
    ddr_cap: int | None = None
    hardware: HardwareProfile | str | None = None
    intra_host_bandwidth: float | None = None
    inter_host_bandwidth: float | None = None
    reserve: float = 0.15
    dense_bytes: int = 0
    replicate: tuple[int, ...] = (1,)
    sum_in_node: bool = True
    across_nodes: AcrossNodes = "sums"
    packed_ids: bool = False
    disk: Disk | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size is {self.world_size}; it must be at least 1.")
        if self.compute_device not in ("cpu", "cuda"):
            raise ValueError(f"compute_device is {self.compute_device!r}; use 'cpu' or 'cuda'.")
        if self.local_size < 1:
            raise ValueError(f"local_world_size is {self.local_size}; it must be at least 1.")
        if self.world_size % self.local_size:
            raise ValueError(
                f"world_size {self.world_size} is not a multiple of local_world_size {self.local_size}; "
                "nodes must have equally many ranks."
            )
        if not 0 <= self.reserve < 1:
            raise ValueError(f"reserve is {self.reserve}; it must be a fraction of the memory in [0, 1).")
        if self.across_nodes not in ("sums", "rows"):
            raise ValueError(f"across_nodes is {self.across_nodes!r}; use 'sums' or 'rows'.")
        if self.across_nodes == "rows" and self.replicate != (1,):
            raise ValueError(
                f"across_nodes is 'rows' and replicate is {self.replicate}; rows cross nodes only without "
                "replication. Use replicate=(1,) or across_nodes='sums'."
            )
        if self.packed_ids and self.across_nodes != "rows":
            raise ValueError("packed_ids is set; IDs are packed only with across_nodes='rows'. Give both.")
        for size in self.replicate:
            if size < 1 or self.world_size % size:
                raise ValueError(
                    f"replicate size {size} does not divide world_size {self.world_size}. Choose a divisor."
                )

    @property
    def local_size(self) -> int:
        """Ranks per node, with the default applied."""
        if self.local_world_size is not None:
            return self.local_world_size
        return min(8, self.world_size) if self.compute_device == "cuda" else self.world_size

    @property
    def profile(self) -> HardwareProfile:
        """Hardware profile, with the memory cap and bandwidths overridden where this topology sets them."""
        given = self.hardware or ("h100" if self.compute_device == "cuda" else "cpu")
        profile = get_profile(given) if isinstance(given, str) else given
        cap = self.hbm_cap if self.compute_device == "cuda" else self.ddr_cap
        profile = profile if cap is None else with_memory(profile, cap)
        return profile.with_bandwidths(self.intra_host_bandwidth, self.inter_host_bandwidth)

    @property
    def memory_cap(self) -> float:
        """Maximum bytes per rank for tables and their buffers."""
        return self.profile.memory * (1 - self.reserve) - self.dense_bytes

    @classmethod
    def from_mesh(cls, mesh: "DeviceMesh", *, hardware: HardwareProfile | str | None = None) -> "Topology":
        """Build a topology from a mesh.

        The mesh has an axis ``shard``, or the axes ``node`` and ``local`` instead. It may also have an axis
        ``replicate``.

        Raises:
            ValueError: the mesh has other axes.
        """
        names = mesh.mesh_dim_names or ()
        sizes = dict(zip(names, mesh.shape, strict=False))
        if not sizes or set(sizes) - {"replicate", "shard", "node", "local"}:
            raise ValueError(
                f"the mesh has the axes {names}; use 'shard', or 'node' and 'local', and perhaps 'replicate'."
            )
        return cls(
            world_size=mesh.size(),
            compute_device=mesh.device_type,
            local_world_size=sizes.get("local"),
            hardware=hardware,
            replicate=(sizes.get("replicate", 1),),
            sum_in_node="local" in sizes,
        )


class Placements(NamedTuple):
    """Plan as arrays: N rectangles (row range x column range of a table on a rank) for T tables.

    ``table_N`` holds table indices. Rows and columns are half-open intervals, so ``row_end_N`` is the first
    row after the rectangle. ``replicated_T`` marks data-parallel tables, which have no rectangle.
    """

    table_N: Ints
    row_start_N: Ints
    row_end_N: Ints
    column_start_N: Ints
    column_end_N: Ints
    rank_N: Ints
    replicated_T: Bools
