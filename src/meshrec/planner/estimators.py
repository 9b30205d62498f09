"""The cost model: seconds per phase, and bytes of memory, of any rectangle on any rank.

A training step is a chain of phases. Each phase ends in a collective, or is one, which acts as a barrier. So
a step takes the sum over phases of the slowest rank's time in the phase. Within a phase, a rank's load is the
sum over the rectangles that it holds, plus the cost of data-parallel tables, which is equal on all ranks.

The batch is spread evenly over ranks. In an all-to-all of embeddings, each rank therefore receives the mean
of what the ranks send; for IDs and gradients, each rank sends that mean. So no receiver is slower than the
slowest owner, and in full duplex the phase takes as long as that owner. If a rank cannot send and receive at
once, the mean is added.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshrec.comms.wire import FP32, WireFormats
from meshrec.planner.hardware import Link
from meshrec.planner.types import STATE_BYTES, Bools, Floats, Ints, Table, Topology

PHASES = ("ids", "lookup", "output", "gradient", "row_stats", "replicas", "data_parallel", "update")
"""The phases of a step, in order:

- ids: the all-to-alls of sizes and IDs.
- lookup: the forward kernel.
- output, gradient: the all-to-alls of embeddings and of their gradients.
- row_stats: the all-reduce of row statistics of tables split by columns.
- replicas: the exchange of sparse gradients over the ``replicate`` axis.
- data_parallel: the exchange for tables that every rank holds.
- update: the fused optimizer step.
"""
NUM_PHASES = len(PHASES)
_IDS, _LOOKUP, _OUTPUT, _GRADIENT, _ROW_STATS, _REPLICAS, _DATA_PARALLEL, _UPDATE = range(NUM_PHASES)

ID_BYTES, WIDE_ID_BYTES = 4, 8
_WIDE_ROWS = 1 << 31
"""Number of rows of a table from which all IDs of its module travel as 64-bit numbers."""
LENGTH_BYTES = 4
SAMPLE_WEIGHT_BYTES = 4
STATISTIC_BYTES = 4
VALUE_BYTES = FP32.value_bytes
"""Bytes of an fp32 value. Results, sums of gradients, and exchanges between replicas are fp32. The latter
have no shorter wire format, because replicas must make the same update, bit for bit.
"""
_FORWARD_WAY, _BACKWARD_WAY = range(2)
_STATISTICS_PASSES = 4


class Usage(NamedTuple):
    """The kinds of placement that a plan uses. Each kind adds the latency of its collectives."""

    sharded: bool
    row_stats: bool
    data_parallel: bool


class TableArrays(NamedTuple):
    """The attributes of T tables as arrays."""

    rows_T: Ints
    columns_T: Ints
    ids_T: Floats
    """IDs per rank's batch."""
    bags_T: Floats
    """Bags per rank's batch."""
    outputs_T: Floats
    """Output rows per rank's batch: one per bag of a pooled table, one per ID of others."""
    pooled_T: Bools
    weight_bytes_T: Floats
    row_bytes_T: Floats
    trained_T: Bools
    id_bytes_T: Floats
    """Bytes of an ID on the wire, with its per-sample weight."""
    state_per_column_T: Floats
    state_per_row_T: Floats
    wires_T: Ints
    """Index into ``wires`` of each table's pair of wire formats."""
    wires: list[WireFormats]
    row_statistics_bytes_T: Floats
    """Bytes of row statistics per distinct row, which column shards add up before the update."""
    effective_rows_T: Floats


class RowOnWire(NamedTuple):
    """N rows of embeddings or gradients, as they travel."""

    wire_bytes: Floats
    """Bytes of the encoded row."""
    kernel_bytes: Floats
    """Bytes of one value as kernels write it."""
    is_cast: Bools
    """Whether kernels write the values as they travel, without encoding afterwards."""


class Hops(NamedTuple):
    """The path of the rows of N rectangles to the ranks that asked for them."""

    two_N: Bools
    """Whether the rows take two hops: first inside a node, then between nodes."""
    summed_N: Bools
    """Whether all ranks of the node hold parts of the rows, so that only their sum takes the second hop."""


class _Routes(NamedTuple):
    """The links between the ranks of a group, and the shares of a batch that take them."""

    outer: Link
    """The slowest link between two ranks of the group."""
    replicas: Link
    """The slowest link between ranks with the same rectangles."""
    all_ranks: Link
    """The slowest link between any two ranks."""
    same_node: float
    """Share of a rank's rows that other ranks of its node hold."""
    other_nodes: float
    """Share of a rank's rows that ranks of other nodes hold."""
    wire: float
    """Seconds per byte of an all-to-all, over both kinds of links."""
    once: float
    """Factor of work other than transfers. In half duplex, `shared_loads` adds the mean of a phase again."""


def _routes(topology: Topology, num_ranks: int, node_size: int) -> _Routes:
    profile = topology.profile
    multi_node = topology.world_size > topology.local_size
    crosses_nodes = num_ranks >= topology.local_size and multi_node
    same_node, other_nodes = (node_size - 1) / num_ranks, (num_ranks - node_size) / num_ranks
    return _Routes(
        outer=profile.inter if num_ranks > node_size else profile.intra,
        replicas=profile.inter if crosses_nodes else profile.intra,
        all_ranks=profile.inter if multi_node else profile.intra,
        same_node=same_node,
        other_nodes=other_nodes,
        wire=same_node / profile.intra.all_to_all + other_nodes / profile.inter.all_to_all,
        once=1.0 if profile.full_duplex else 0.5,
    )


class CostModel:
    """The cost of rectangles, in seconds and bytes.

    Args:
        tables: the tables to plan.
        topology: the machine. Its `world_size` ranks form `replicas` groups; one group is planned.
        batch_size: samples per rank.
        replicas: size of the ``replicate`` axis.
    """

    def __init__(
        self, tables: Sequence[Table], topology: Topology, *, batch_size: int, replicas: int = 1
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; give the number of samples per rank, at least 1.")
        if topology.world_size % replicas:
            raise ValueError(
                f"{replicas} replicas do not divide {topology.world_size} ranks. Choose a divisor."
            )
        self.tables = tuple(tables)
        self.topology = topology
        self.batch_size = batch_size
        self.replicas = replicas
        self.profile = topology.profile
        self.num_ranks = topology.world_size // replicas
        self.node_size = min(topology.local_size, self.num_ranks)
        self.sum_in_node = topology.sum_in_node and 1 < self.node_size < self.num_ranks
        self.memory_cap = topology.memory_cap
        self.arrays = _arrays(self.tables, batch_size)
        self._routes = _routes(topology, self.num_ranks, self.node_size)

    def rectangle_loads(
        self,
        table_N: npt.NDArray[np.integer],
        rows_N: npt.NDArray[np.number],
        columns_N: npt.NDArray[np.number],
        in_node_N: Bools,
    ) -> Floats:
        """Return the seconds [N, NUM_PHASES] that rectangles of `rows_N` x `columns_N` cost the rank that
        holds them.

        `in_node_N` says whether every rank of the rectangle's node holds other rows of the same columns, so
        that partial sums are added up inside the node.
        """
        a, p = self.arrays, self.profile
        table = np.asarray(table_N)
        columns = np.asarray(columns_N, np.float64)
        share = np.asarray(rows_N, np.float64) / a.rows_T[table]
        ids = a.ids_T[table] * self.num_ranks * share
        bags = a.bags_T[table] * self.num_ranks
        outputs = np.where(a.pooled_T[table], bags, ids)
        row_bytes = columns * a.weight_bytes_T[table] + a.row_bytes_T[table]
        loads = np.zeros((len(table), NUM_PHASES))
        loads[:, _IDS] = self.id_travel_seconds(table, share)
        per_id = p.route_id_seconds + np.where(share < 1, p.split_id_seconds, 0.0)
        loads[:, _IDS] += self._routes.once * ids * per_id
        read = ids * (p.read_row_seconds + row_bytes / p.read_bandwidth)
        elements = outputs * columns
        hops = self._hops(table, in_node_N)
        for way, phase in ((_FORWARD_WAY, _OUTPUT), (_BACKWARD_WAY, _GRADIENT)):
            row = self._row_on_wire(table, columns, way)
            loads[:, phase] = self._embedding_seconds(outputs * row.wire_bytes, hops)
            # The receiver puts results into table order, and the sender takes gradients apart. A rank
            # copies its own part instead of sending it. The batch is spread evenly, so this work is
            # counted on the rank that holds the rectangle.
            kernel = elements * row.kernel_bytes
            passes = elements * VALUE_BYTES + kernel + 2 * kernel / self.num_ranks
            # Formats that are more than a cast take another pass at both ends.
            passes += np.where(row.is_cast, 0.0, 2 * (kernel + outputs * row.wire_bytes))
            loads[:, phase] += self._routes.once * passes / p.stream_bandwidth
            if way == _FORWARD_WAY:
                loads[:, _LOOKUP] = read + kernel / p.stream_bandwidth
        loads[:, _UPDATE] = self._update_seconds(table, ids, columns, share, self.replicas)
        if self.replicas > 1:
            loads[:, _REPLICAS] = self._replica_seconds(table, ids, columns, share)
        distinct = self._distinct(table, ids, share)
        sums = distinct * a.row_statistics_bytes_T[table]
        statistics = 2 * sums * self._routes.wire
        is_split = (columns < a.columns_T[table]) & (a.row_statistics_bytes_T[table] > 0)
        # Row statistics are exchanged between the sum of gradients and the update.
        if p.sorts_once:  # sorted IDs are reused; gradients are read twice
            # The sums are copied for the others, added up, divided, and sorted.
            statistics += p.statistics_seconds + _STATISTICS_PASSES * 2 * sums / p.stream_bandwidth
            again = elements * VALUE_BYTES / p.stream_bandwidth
        else:  # the sums of gradients are written and read
            summed = distinct * columns * VALUE_BYTES / p.stream_bandwidth
            statistics += summed
            again = 2 * summed
        loads[:, _ROW_STATS] = np.where(is_split, statistics, 0.0)
        loads[:, _UPDATE] += np.where(is_split, again + distinct * p.update_id_seconds, 0.0)
        return self._without_backward(table, loads)

    def rectangle_bytes(
        self,
        table_N: npt.NDArray[np.integer],
        rows_N: npt.NDArray[np.number],
        columns_N: npt.NDArray[np.number],
    ) -> Floats:
        """Return the bytes [N] of rectangles on the ranks that hold them: weights, optimizer state, incoming
        IDs, outgoing embeddings and gradients.
        """
        a = self.arrays
        table = np.asarray(table_N)
        rows, columns = np.asarray(rows_N, np.float64), np.asarray(columns_N, np.float64)
        ids = a.ids_T[table] * self.num_ranks * rows / a.rows_T[table]
        bags = a.bags_T[table] * self.num_ranks
        outputs = np.where(a.pooled_T[table], bags, ids)
        parameters = rows * (columns * self._column_bytes(table) + self._row_bytes(table))
        # IDs as they arrived, and unpacked.
        buffers = 2 * ids * a.id_bytes_T[table] + bags * LENGTH_BYTES
        return parameters + buffers + outputs * self._row_buffers(table, columns)

    def received_bytes(
        self,
        table_N: npt.NDArray[np.integer],
        rows_N: npt.NDArray[np.number],
        columns_N: npt.NDArray[np.number],
        in_node_N: Bools,
    ) -> Floats:
        """Return the bytes [N] that a rectangle's outputs and their gradients take on *every* rank."""
        a = self.arrays
        table = np.asarray(table_N)
        share = np.asarray(rows_N, np.float64) / a.rows_T[table]
        outputs = np.where(a.pooled_T[table], a.bags_T[table], a.ids_T[table] * share)
        parts = np.where(self._hops(table, in_node_N).summed_N, 1.0 / self.node_size, 1.0)
        columns = np.asarray(columns_N, np.float64)
        result: Floats = outputs * parts * self._row_buffers(table, columns)
        return result

    def sent_bytes(
        self,
        table_N: npt.NDArray[np.integer],
        rows_N: npt.NDArray[np.number],
        columns_N: npt.NDArray[np.number],
        in_node_N: Bools,
    ) -> Floats:
        """Return the bytes [N, 2] that leave ranks in a step for rectangles: embeddings, and their gradients.

        They are summed over all ranks that send a part of them, in the wire formats of the tables.
        """
        a = self.arrays
        table, columns = np.asarray(table_N), np.asarray(columns_N, np.float64)
        share = np.asarray(rows_N, np.float64) / a.rows_T[table]
        outputs = np.where(a.pooled_T[table], a.bags_T[table], a.ids_T[table] * share) * self.num_ranks
        found = np.zeros((len(table), 2))
        for way in (_FORWARD_WAY, _BACKWARD_WAY):
            row = self._row_on_wire(table, columns, way)
            inside, across = self._sent(outputs * row.wire_bytes, self._hops(table, in_node_N))
            found[:, way] = inside + across
        found[:, _BACKWARD_WAY] *= a.trained_T[table]
        return found

    def replicated_loads(self, table_N: npt.NDArray[np.integer]) -> Floats:
        """Return the seconds [N, NUM_PHASES] that data-parallel tables cost every rank."""
        a, p = self.arrays, self.profile
        table = np.asarray(table_N)
        columns = a.columns_T[table].astype(np.float64)
        ids, one = a.ids_T[table], np.ones(len(table))
        loads = np.zeros((len(table), NUM_PHASES))
        row_bytes = columns * a.weight_bytes_T[table] + a.row_bytes_T[table]
        read = ids * (p.read_row_seconds + row_bytes / p.read_bandwidth)
        loads[:, _LOOKUP] = read + a.outputs_T[table] * columns * VALUE_BYTES / p.stream_bandwidth
        loads[:, _IDS] = ids * p.route_id_seconds
        passes = a.outputs_T[table] * columns * VALUE_BYTES * 2 / p.stream_bandwidth
        loads[:, _OUTPUT] = loads[:, _GRADIENT] = passes
        world = self.topology.world_size
        loads[:, _UPDATE] = self._update_seconds(table, ids, columns, one, world)
        summed = a.rows_T[table] * columns * VALUE_BYTES
        dense = 2 * (world - 1) / world * summed / self._routes.all_ranks.all_reduce
        sparse = self._gather_seconds(table, ids, a.outputs_T[table] * columns, world, self._routes.all_ranks)
        loads[:, _DATA_PARALLEL] = np.minimum(dense, sparse)
        return self._without_backward(table, loads)

    def replicated_bytes(self, table_N: npt.NDArray[np.integer]) -> Floats:
        """Return the bytes [N] that data-parallel tables take on every rank, including their gradients."""
        a = self.arrays
        table = np.asarray(table_N)
        columns = a.columns_T[table].astype(np.float64)
        row = columns * self._column_bytes(table) + self._row_bytes(table)
        touched = np.minimum(a.rows_T[table], a.ids_T[table] * self.topology.world_size)
        held = a.rows_T[table] * row + touched * columns * VALUE_BYTES * a.trained_T[table]
        return held + a.outputs_T[table] * columns * VALUE_BYTES * (1 + a.trained_T[table])

    def id_travel_seconds(self, table_N: npt.NDArray[np.integer], share_N: Floats) -> Floats:
        """Return the seconds [N] that IDs travel to rectangles with `share_N` of their table's rows. Other
        work can hide this time.
        """
        a = self.arrays
        ids, bags = a.ids_T[table_N] * self.num_ranks * share_N, a.bags_T[table_N] * self.num_ranks
        travel: Floats = (ids * a.id_bytes_T[table_N] + bags * LENGTH_BYTES) * self._routes.wire
        return travel

    @property
    def id_latency_seconds(self) -> float:
        """Seconds of latency of the two all-to-alls of sizes and of IDs."""
        return 2 * self._routes.outer.latency if self.num_ranks > 1 else 0.0

    def shared_loads(self, mean_loads: Floats) -> Floats:
        """Return the seconds [NUM_PHASES] to add to every rank, given the mean over ranks of the rectangles'
        loads.
        """
        if self.profile.full_duplex:
            return np.zeros(NUM_PHASES)
        return np.where(_IS_EXCHANGE, mean_loads, 0.0)

    def fixed_seconds(self, usage: Usage) -> Floats:
        """Return the seconds [NUM_PHASES] that the phases take wherever the tables are."""
        fixed = np.zeros(NUM_PHASES)
        a, p = self.arrays, self.profile
        fixed[[_LOOKUP, _UPDATE]] = p.kernel_seconds
        fixed[_IDS] = a.ids_T.sum() * p.scan_id_seconds + a.bags_T.sum() * p.scan_bag_seconds
        if self.num_ranks > 1:  # all-to-alls run even if nothing travels
            latency = self._routes.outer.latency
            fixed[[_IDS, _OUTPUT, _GRADIENT]] += self.id_latency_seconds, latency, latency
            fixed[_ROW_STATS] = latency if usage.row_stats else 0.0
        if self.replicas > 1 and usage.sharded:
            fixed[_REPLICAS] = 2 * self._routes.replicas.latency
        if self.topology.world_size > 1 and usage.data_parallel:
            fixed[_DATA_PARALLEL] = self._routes.all_ranks.latency
        return fixed

    def _hops(self, table: npt.NDArray[np.integer], in_node_N: Bools) -> Hops:
        """Return the path of the rows of rectangles. Only pooled rows are summed, so only they take two
        hops.
        """
        two = self.arrays.pooled_T[table] & self.sum_in_node
        return Hops(two, two & in_node_N)

    def _sent(self, bytes_N: Floats, hops: Hops) -> tuple[Floats, Floats]:
        """Return the bytes of rectangles' rows that leave a rank: within its node, and across the network."""
        # The first of two hops goes to the rank of this node with the receiver's local rank. If all its ranks
        # hold a part of each row, only the sum of the parts takes the second hop.
        inside = bytes_N * np.where(hops.two_N, (self.node_size - 1) / self.node_size, self._routes.same_node)
        across = bytes_N * self._routes.other_nodes / np.where(hops.summed_N, self.node_size, 1)
        return inside, across

    def _embedding_seconds(self, bytes_N: Floats, hops: Hops) -> Floats:
        inside, across = self._sent(bytes_N, hops)
        intra = self.profile.intra
        speed = np.where(hops.summed_N, intra.reduce_scatter, intra.all_to_all)
        result: Floats = inside / speed + across / self.profile.inter.all_to_all
        return result

    def _update_seconds(
        self, table: npt.NDArray[np.integer], ids: Floats, columns: Floats, share: Floats, replicas: int
    ) -> Floats:
        """Return the seconds of updates: `ids` gradient rows are summed by row, then each distinct row of all
        replicas is read and written.
        """
        a, p = self.arrays, self.profile
        distinct = self._distinct(table, ids * replicas, share)
        outputs = np.where(a.pooled_T[table], a.bags_T[table] * self.num_ranks, ids)
        gather = ids * p.update_id_seconds + outputs * columns * VALUE_BYTES / p.stream_bandwidth
        row_bytes = columns * (2 * a.weight_bytes_T[table] + 2 * STATE_BYTES * a.state_per_column_T[table])
        result: Floats = gather + distinct * (p.update_row_seconds + row_bytes / p.update_bandwidth)
        return result

    def _replica_seconds(
        self, table: npt.NDArray[np.integer], ids: Floats, columns: Floats, share: Floats
    ) -> Floats:
        rows, pooled = self.arrays.rows_T[table] * share, self.arrays.pooled_T[table]
        outputs = np.where(pooled, self.arrays.bags_T[table] * self.num_ranks, ids)
        others, link = self.replicas - 1, self._routes.replicas
        sparse = self._gather_seconds(table, ids, outputs * columns, self.replicas, link)
        dense = 2 * others / self.replicas * rows * columns * VALUE_BYTES / link.all_reduce
        result: Floats = np.minimum(sparse, dense)
        return result

    def _gather_seconds(
        self, table: npt.NDArray[np.integer], ids: Floats, elements: Floats, ranks: int, link: Link
    ) -> Floats:
        """Return the seconds in which each of `ranks` gets the others' IDs and output gradients. Each of them
        is packed and unpacked once.
        """
        sent = ids * self.arrays.id_bytes_T[table] + elements * VALUE_BYTES
        passes = 2 * (1 + ranks) * sent / self.profile.stream_bandwidth
        result: Floats = (ranks - 1) * sent / link.reduce_scatter + (passes if ranks > 1 else 0.0)
        return result

    def _distinct(self, table: npt.NDArray[np.integer], ids: Floats, share: Floats) -> Floats:
        """Return the expected number of distinct rows among `ids` draws from the effective rows of a share of
        a table.
        """
        rows = np.maximum(self.arrays.effective_rows_T[table] * share, 1e-9)
        distinct: Floats = rows * -np.expm1(-ids / rows)
        return distinct

    def _without_backward(self, table: npt.NDArray[np.integer], loads: Floats) -> Floats:
        """Keep only the forward phases of tables that are not trained."""
        is_forward = np.isin(np.arange(NUM_PHASES), _FORWARD)
        result: Floats = np.where(self.arrays.trained_T[table][:, None] | is_forward, loads, 0.0)
        return result

    def _row_on_wire(self, table: npt.NDArray[np.integer], columns: Floats, way: int) -> RowOnWire:
        """Return the sizes of rows of ``columns`` as they travel, in the tables' wire formats."""
        formats = [wire[way] for wire in self.arrays.wires]
        index = self.arrays.wires_T[table]
        value_bytes = np.array([each.value_bytes for each in formats], np.float64)[index]
        overhead = np.array([each.row_overhead for each in formats], np.float64)[index]
        kernel_bytes = np.array([each.kernel_dtype.itemsize for each in formats], np.float64)[index]
        is_cast = np.array([each.is_cast for each in formats], bool)[index]
        return RowOnWire(np.ceil(columns * value_bytes) + overhead, kernel_bytes, is_cast)

    def _row_buffers(self, table: npt.NDArray[np.integer], columns: Floats) -> Floats:
        """Return the bytes of the buffers for one looked-up row and its gradient."""
        found = np.zeros(len(table))
        for way, counts in ((_FORWARD_WAY, 1.0), (_BACKWARD_WAY, self.arrays.trained_T[table])):
            row = self._row_on_wire(table, columns, way)
            found += counts * (row.wire_bytes + np.where(row.is_cast, 0.0, columns * row.kernel_bytes))
        return found

    def _row_bytes(self, table: npt.NDArray[np.integer]) -> Floats:
        state: Floats = STATE_BYTES * self.arrays.state_per_row_T[table]
        result: Floats = state + self.arrays.row_bytes_T[table]
        return result

    def _column_bytes(self, table: npt.NDArray[np.integer]) -> Floats:
        state: Floats = STATE_BYTES * self.arrays.state_per_column_T[table]
        result: Floats = self.arrays.weight_bytes_T[table] + state
        return result


_FORWARD = [_IDS, _LOOKUP, _OUTPUT]
_IS_EXCHANGE = np.isin(np.arange(NUM_PHASES), [_IDS, _OUTPUT, _GRADIENT])


def _arrays(tables: Sequence[Table], batch_size: int) -> TableArrays:
    batch = np.array([table.batch_size or batch_size for table in tables], np.float64)
    ids = batch * [table.ids_per_sample for table in tables]
    bags = batch * [table.bags_per_sample for table in tables]
    rows = np.array([table.num_embeddings for table in tables], np.int64)
    id_bytes = WIDE_ID_BYTES if (rows >= _WIDE_ROWS).any() else ID_BYTES
    wires = sorted({table.wire for table in tables}, key=str)
    hot = np.array([table.effective_rows or table.num_embeddings for table in tables], np.float64)
    return TableArrays(
        rows_T=rows,
        columns_T=np.array([table.embedding_dim for table in tables], np.int64),
        ids_T=ids,
        bags_T=bags,
        outputs_T=np.where([table.pooled for table in tables], bags, ids),
        pooled_T=np.array([table.pooled for table in tables], bool),
        weight_bytes_T=np.array([table.weight_bytes for table in tables], np.float64),
        row_bytes_T=np.array([table.row_bytes for table in tables], np.float64),
        trained_T=np.array([table.trained for table in tables], bool),
        id_bytes_T=np.array(
            [id_bytes + SAMPLE_WEIGHT_BYTES * table.weighted for table in tables], np.float64
        ),
        state_per_column_T=np.array([table.optimizer.state_per_row[0] for table in tables], np.float64),
        state_per_row_T=np.array([table.optimizer.state_per_row[1] for table in tables], np.float64),
        wires_T=np.array([wires.index(table.wire) for table in tables], np.int64),
        wires=wires,
        row_statistics_bytes_T=np.array(
            [STATISTIC_BYTES * table.optimizer.row_statistics for table in tables], np.float64
        ),
        effective_rows_T=np.minimum(hot, rows),
    )
