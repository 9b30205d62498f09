"""The cost model: seconds per phase and bytes of memory for any rectangle on any rank.

A training step is a chain of phases, and each ends in (or is) a collective, that is, a barrier. So a step
takes the sum over phases of the slowest rank's phase. Within a phase a rank's load is a sum over the
rectangles it holds, plus what data-parallel tables cost every rank alike.

The batch is spread evenly, so each rank receives from an all-to-all the mean of what ranks send (or the
other way round for ids and gradients). The slowest owner is therefore never faster than any receiver, and a
full-duplex phase is the slowest owner's; where a rank cannot send and receive at once, the mean is added.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshrec.comms.wire import FP32, WireFormats
from meshrec.planner.hardware import Link
from meshrec.planner.types import STATE_BYTES, Bools, Floats, Ints, Table, Topology

PHASES = ("ids", "lookup", "output", "gradient", "row_stats", "replicas", "data_parallel", "update")
"""The phases of a step, in order.

ids: the all-to-alls of sizes and ids. lookup: the forward kernel. output, gradient: the all-to-alls of
embeddings and their gradients. row_stats: the all-reduce of row statistics of tables split by columns.
replicas: the exchange of sparse gradients over the ``replicate`` axis. data_parallel: the exchange for
tables that every rank holds.
update: the fused optimizer step.
"""
NUM_PHASES = len(PHASES)
_IDS, _LOOKUP, _OUTPUT, _GRADIENT, _ROW_STATS, _REPLICAS, _DATA_PARALLEL, _UPDATE = range(NUM_PHASES)

ID_BYTES, WIDE_ID_BYTES = 4, 8
_WIDE_ROWS = 1 << 31
"""One table of so many rows makes all ids of its module travel as 64-bit numbers."""
LENGTH_BYTES = 4
SAMPLE_WEIGHT_BYTES = 4
STATISTIC_BYTES = 4
VALUE_BYTES = FP32.value_bytes
"""Bytes of an fp32 value: what results, sums of gradients and exchanges between replicas are made of. Those
exchanges take no shorter wire format, because replicas must make the same update, bit for bit."""
_FORWARD_WAY, _BACKWARD_WAY = range(2)
_STATISTICS_PASSES = 4


class Usage(NamedTuple):
    """Which kinds of placement a plan uses: each adds the latency of its collectives."""

    sharded: bool
    row_stats: bool
    data_parallel: bool


class TableArrays(NamedTuple):
    """Attributes of T tables as arrays."""

    rows_T: Ints
    columns_T: Ints
    ids_T: Floats
    """Ids per rank's batch."""
    bags_T: Floats
    """Bags per rank's batch."""
    outputs_T: Floats
    """Output rows per rank's batch: bags of pooled tables, ids of others."""
    pooled_T: Bools
    weight_bytes_T: Floats
    row_bytes_T: Floats
    trained_T: Bools
    id_bytes_T: Floats
    """Of an id on the wire, with its per-sample weight."""
    state_per_column_T: Floats
    state_per_row_T: Floats
    wires_T: Ints
    """The pair of wire formats of each table, as an index into ``wires``."""
    wires: list[WireFormats]
    row_statistics_bytes_T: Floats
    """Bytes per distinct row that the parts of a row add up before the update."""
    effective_rows_T: Floats


class RowOnWire(NamedTuple):
    """N rows of embeddings or gradients as they travel."""

    wire_bytes: Floats
    """Of the encoded row."""
    kernel_bytes: Floats
    """Of one value as kernels write it."""
    is_cast: Bools
    """Whether what kernels write is what travels."""


class Hops(NamedTuple):
    """How the rows of N rectangles reach the ranks that asked."""

    two_N: Bools
    """Whether they travel inside a node first, and between nodes then."""
    summed_N: Bools
    """Whether all ranks of the node hold parts of them, so that one sum goes on."""


class CostModel:
    """Turns rectangles into seconds and bytes.

    Args:
        tables: what is planned.
        topology: the machine. Its `world_size` ranks split into `replicas` groups; one group is planned.
        batch_size: samples per rank.
        replicas: size of the ``replicate`` axis.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        topology: Topology,
        *,
        batch_size: int,
        replicas: int = 1,
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
        multi_node = self.num_ranks > self.node_size
        self._outer: Link = self.profile.inter if multi_node else self.profile.intra
        crosses_nodes = self.num_ranks >= topology.local_size and topology.world_size > topology.local_size
        self._replica_link: Link = self.profile.inter if crosses_nodes else self.profile.intra
        self._all_link: Link = (
            self.profile.inter if topology.world_size > topology.local_size else self.profile.intra
        )
        # For what is no transfer: where transfers exclude each other `shared_loads` adds the mean again.
        self._once = 1.0 if self.profile.full_duplex else 0.5
        same_node = (self.node_size - 1) / self.num_ranks
        other_nodes = (self.num_ranks - self.node_size) / self.num_ranks
        self._same_node, self._other_nodes = same_node, other_nodes
        self._wire = same_node / self.profile.intra.all_to_all + other_nodes / self.profile.inter.all_to_all

    def rectangle_loads(
        self,
        table_N: npt.NDArray[np.integer],
        rows_N: npt.NDArray[np.number],
        columns_N: npt.NDArray[np.number],
        in_node_N: Bools,
    ) -> Floats:
        """Seconds [N, NUM_PHASES] that rectangles of `rows_N` x `columns_N` cost the rank that holds them.

        `in_node_N`: whether every rank of the rectangle's node holds other rows of the same columns, so
        that partial sums stay inside the node.
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
        loads[:, _IDS] += self._once * ids * per_id
        read = ids * (p.read_row_seconds + row_bytes / p.read_bandwidth)
        elements = outputs * columns
        hops = self._hops(table, in_node_N)
        for way, phase in ((_FORWARD_WAY, _OUTPUT), (_BACKWARD_WAY, _GRADIENT)):
            row = self._row_on_wire(table, columns, way)
            loads[:, phase] = self._embedding_seconds(outputs * row.wire_bytes, hops)
            # Results are laid in table order where they arrive, gradients taken apart where they leave; a
            # rank's own part is copied in place of sent. The batch is even, so this is counted where the
            # rectangle is.
            kernel = elements * row.kernel_bytes
            passes = elements * VALUE_BYTES + kernel + 2 * kernel / self.num_ranks
            # What is no cast is read and written once more at both ends.
            passes += np.where(row.is_cast, 0.0, 2 * (kernel + outputs * row.wire_bytes))
            loads[:, phase] += self._once * passes / p.stream_bandwidth
            if way == _FORWARD_WAY:
                loads[:, _LOOKUP] = read + kernel / p.stream_bandwidth
        loads[:, _UPDATE] = self._update_seconds(table, ids, columns, share, self.replicas)
        if self.replicas > 1:
            loads[:, _REPLICAS] = self._replica_seconds(table, ids, columns, share)
        distinct = self._distinct(table, ids, share)
        sums = distinct * a.row_statistics_bytes_T[table]
        statistics = 2 * sums * self._wire
        is_split = (columns < a.columns_T[table]) & (a.row_statistics_bytes_T[table] > 0)
        # Row statistics come between summing gradients and using them.
        if p.sorts_once:  # what was sorted is kept; gradients are passed over again
            # The sums are copied for the others, added up, divided, and put in order.
            statistics += p.statistics_seconds + _STATISTICS_PASSES * 2 * sums / p.stream_bandwidth
            again = elements * VALUE_BYTES / p.stream_bandwidth
        else:  # the sums are written and read
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
        """Bytes [N] on the rank that holds a rectangle: weights, optimizer state, ids in, embeddings and
        gradients out."""
        a = self.arrays
        table = np.asarray(table_N)
        rows, columns = np.asarray(rows_N, np.float64), np.asarray(columns_N, np.float64)
        ids = a.ids_T[table] * self.num_ranks * rows / a.rows_T[table]
        bags = a.bags_T[table] * self.num_ranks
        outputs = np.where(a.pooled_T[table], bags, ids)
        parameters = rows * (columns * self._column_bytes(table) + self._row_bytes(table))
        # Ids as they arrived, and unpacked.
        buffers = 2 * ids * a.id_bytes_T[table] + bags * LENGTH_BYTES
        return parameters + buffers + outputs * self._row_buffers(table, columns)

    def received_bytes(
        self,
        table_N: npt.NDArray[np.integer],
        rows_N: npt.NDArray[np.number],
        columns_N: npt.NDArray[np.number],
        in_node_N: Bools,
    ) -> Floats:
        """Bytes [N] that a rectangle's outputs and their gradients take on *every* rank."""
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
        """Bytes [N, 2] that leave ranks in a step for rectangles: embeddings, and their gradients.

        Summed over all ranks that send a part of them, with the wire formats of the tables.
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
        """Seconds [N, NUM_PHASES] that a data-parallel table costs every rank."""
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
        dense = 2 * (world - 1) / world * summed / self._all_link.all_reduce
        sparse = self._gather_seconds(table, ids, a.outputs_T[table] * columns, world, self._all_link)
        loads[:, _DATA_PARALLEL] = np.minimum(dense, sparse)
        return self._without_backward(table, loads)

    def replicated_bytes(self, table_N: npt.NDArray[np.integer]) -> Floats:
        """Bytes [N] that a data-parallel table takes on every rank, its gradient included."""
        a = self.arrays
        table = np.asarray(table_N)
        columns = a.columns_T[table].astype(np.float64)
        row = columns * self._column_bytes(table) + self._row_bytes(table)
        touched = np.minimum(a.rows_T[table], a.ids_T[table] * self.topology.world_size)
        held = a.rows_T[table] * row + touched * columns * VALUE_BYTES * a.trained_T[table]
        return held + a.outputs_T[table] * columns * VALUE_BYTES * (1 + a.trained_T[table])

    def id_travel_seconds(self, table_N: npt.NDArray[np.integer], share_N: Floats) -> Floats:
        """Seconds [N] that ids are on their way to rectangles with `share_N` of their table's rows: what
        other work can hide."""
        a = self.arrays
        ids, bags = a.ids_T[table_N] * self.num_ranks * share_N, a.bags_T[table_N] * self.num_ranks
        travel: Floats = (ids * a.id_bytes_T[table_N] + bags * LENGTH_BYTES) * self._wire
        return travel

    @property
    def id_latency_seconds(self) -> float:
        """Of the all-to-alls of sizes and of ids."""
        return 2 * self._outer.latency if self.num_ranks > 1 else 0.0

    def shared_loads(self, mean_loads: Floats) -> Floats:
        """Seconds [NUM_PHASES] to add to every rank, given the mean over ranks of the rectangles' loads."""
        if self.profile.full_duplex:
            return np.zeros(NUM_PHASES)
        return np.where(_IS_EXCHANGE, mean_loads, 0.0)

    def fixed_seconds(self, usage: Usage) -> Floats:
        """Seconds [NUM_PHASES] that the phases take whoever holds what."""
        fixed = np.zeros(NUM_PHASES)
        a, p = self.arrays, self.profile
        fixed[[_LOOKUP, _UPDATE]] = p.kernel_seconds
        fixed[_IDS] = a.ids_T.sum() * p.scan_id_seconds + a.bags_T.sum() * p.scan_bag_seconds
        if self.num_ranks > 1:  # all-to-alls are made even where nothing travels
            latency = self._outer.latency
            fixed[[_IDS, _OUTPUT, _GRADIENT]] += self.id_latency_seconds, latency, latency
            fixed[_ROW_STATS] = latency if usage.row_stats else 0.0
        if self.replicas > 1 and usage.sharded:
            fixed[_REPLICAS] = 2 * self._replica_link.latency
        if self.topology.world_size > 1 and usage.data_parallel:
            fixed[_DATA_PARALLEL] = self._all_link.latency
        return fixed

    def _hops(self, table: npt.NDArray[np.integer], in_node_N: Bools) -> Hops:
        """How the rows of rectangles travel. Only pooled rows are summed, so only they take two hops."""
        two = self.arrays.pooled_T[table] & self.sum_in_node
        return Hops(two, two & in_node_N)

    def _sent(self, bytes_N: Floats, hops: Hops) -> tuple[Floats, Floats]:
        """Of the rows that rectangles give to all ranks, the bytes that leave a rank: those that stay in its
        node, and those that cross the network.
        """
        # The first of two hops leads to the rank at the receiver's place in this node. Where all ranks of the
        # node hold a part of each row, one sum of these goes on.
        inside = bytes_N * np.where(hops.two_N, (self.node_size - 1) / self.node_size, self._same_node)
        across = bytes_N * self._other_nodes / np.where(hops.summed_N, self.node_size, 1)
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
        """`ids` gradient rows are summed by row; then each distinct row of all replicas is read and
        written."""
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
        others, link = self.replicas - 1, self._replica_link
        sparse = self._gather_seconds(table, ids, outputs * columns, self.replicas, link)
        dense = 2 * others / self.replicas * rows * columns * VALUE_BYTES / link.all_reduce
        result: Floats = np.minimum(sparse, dense)
        return result

    def _gather_seconds(
        self, table: npt.NDArray[np.integer], ids: Floats, elements: Floats, ranks: int, link: Link
    ) -> Floats:
        """Every one of `ranks` gets the others' ids and gradients of outputs; each is packed and read out
        once."""
        sent = ids * self.arrays.id_bytes_T[table] + elements * VALUE_BYTES
        passes = 2 * (1 + ranks) * sent / self.profile.stream_bandwidth
        result: Floats = (ranks - 1) * sent / link.reduce_scatter + (passes if ranks > 1 else 0.0)
        return result

    def _distinct(self, table: npt.NDArray[np.integer], ids: Floats, share: Floats) -> Floats:
        """Expected distinct rows among `ids` draws, with equal odds, from the effective rows of a part of
        a table."""
        rows = np.maximum(self.arrays.effective_rows_T[table] * share, 1e-9)
        distinct: Floats = rows * -np.expm1(-ids / rows)
        return distinct

    def _without_backward(self, table: npt.NDArray[np.integer], loads: Floats) -> Floats:
        """The forward phases alone, where a table is not trained."""
        is_forward = np.isin(np.arange(NUM_PHASES), _FORWARD)
        result: Floats = np.where(self.arrays.trained_T[table][:, None] | is_forward, loads, 0.0)
        return result

    def _row_on_wire(self, table: npt.NDArray[np.integer], columns: Floats, way: int) -> RowOnWire:
        """How rows of ``columns`` travel, by the tables' formats."""
        formats = [wire[way] for wire in self.arrays.wires]
        index = self.arrays.wires_T[table]
        value_bytes = np.array([each.value_bytes for each in formats], np.float64)[index]
        overhead = np.array([each.row_overhead for each in formats], np.float64)[index]
        kernel_bytes = np.array([each.kernel_dtype.itemsize for each in formats], np.float64)[index]
        is_cast = np.array([each.is_cast for each in formats], bool)[index]
        return RowOnWire(columns * value_bytes + overhead, kernel_bytes, is_cast)

    def _row_buffers(self, table: npt.NDArray[np.integer], columns: Floats) -> Floats:
        """Bytes that one looked-up row takes, and its gradient."""
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
