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

from meshrec.comms.wire import FP32
from meshrec.planner.hardware import Link
from meshrec.planner.table_arrays import arrays_of
from meshrec.planner.travel import Hops, RowOnWire, Sent, packed_id_bytes, routes_of
from meshrec.planner.types import STATE_BYTES, Bools, Floats, Table, Topology

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

LENGTH_BYTES = 4
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
        sums = topology.sum_in_node and not self.rows_across
        self.sum_in_node = sums and 1 < self.node_size < self.num_ranks
        self.memory_cap = topology.memory_cap
        self.arrays = arrays_of(self.tables, batch_size)
        self._routes = routes_of(topology, self.num_ranks, self.node_size, rows_across=self.rows_across)

    @property
    def num_nodes(self) -> int:
        """The number of nodes that a group of ranks lies on."""
        return self.num_ranks // self.node_size

    @property
    def rows_across(self) -> bool:
        """Whether distinct rows cross the network, in place of sums."""
        return self.topology.across_nodes == "rows" and self.num_nodes > 1

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
        fetched = self._fetched(table, ids, share)
        looked_up, encoded = (fetched, fetched) if self.rows_across else (ids, outputs)
        read = looked_up * (p.read_row_seconds + row_bytes / p.read_bandwidth)
        elements = outputs * columns
        hops = self._hops(table, in_node_N)
        for way, phase in ((_FORWARD_WAY, _OUTPUT), (_BACKWARD_WAY, _GRADIENT)):
            row = self._row_on_wire(table, columns, way)
            sent = self._sent_rows(outputs, fetched, columns, row, hops)
            loads[:, phase] = self._embedding_seconds(sent, hops)
            # The receiver puts results into table order, and the sender takes gradients apart. A rank
            # copies its own part instead of sending it. The batch is spread evenly, so this work is
            # counted on the rank that holds the rectangle.
            kernel = encoded * columns * row.kernel_bytes
            passes = elements * VALUE_BYTES + kernel + 2 * kernel / self.num_ranks
            # Formats that are more than a cast take another pass at both ends.
            passes += np.where(row.is_cast, 0.0, 2 * (kernel + encoded * row.wire_bytes))
            loads[:, phase] += self._routes.once * passes / p.stream_bandwidth
            if way == _FORWARD_WAY:
                loads[:, _LOOKUP] = read + kernel / p.stream_bandwidth
        loads[:, _LOOKUP] += self._index_seconds(table, ids, share)
        loads[:, _UPDATE] = self._update_seconds(table, ids, columns, share, self.replicas)
        if self.rows_across:
            self._add_node_work(loads, ids, fetched, columns)
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
        parameters = parameters * self.arrays.in_memory_T[table]
        # IDs as they arrived, and unpacked.
        buffers = 2 * ids * a.id_bytes_T[table] + bags * LENGTH_BYTES
        if self.rows_across:
            outputs = outputs + self._fetched(table, ids, rows / a.rows_T[table])
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
    ) -> dict[str, Sent]:
        """Return the bytes that leave ranks in a step for rectangles: ``"ids"``, embeddings (``"output"``)
        and their gradients (``"gradient"``), as they are encoded.

        They are summed over all ranks that send a part of them. Sizes of messages are not among them.
        """
        a = self.arrays
        table, columns = np.asarray(table_N), np.asarray(columns_N, np.float64)
        share = np.asarray(rows_N, np.float64) / a.rows_T[table]
        ids = a.ids_T[table] * self.num_ranks * share
        outputs = np.where(a.pooled_T[table], a.bags_T[table] * self.num_ranks, ids)
        fetched, hops = self._fetched(table, ids, share), self._hops(table, in_node_N)
        found = {"ids": self._sent_ids(table, share)}
        for way, name, counts in (
            (_FORWARD_WAY, "output", np.ones(len(table))),
            (_BACKWARD_WAY, "gradient", a.trained_T[table]),
        ):
            row = self._row_on_wire(table, columns, way)
            sent = self._sent_rows(outputs, fetched, columns, row, hops)
            found[name] = Sent(*(counts * each for each in sent))
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
        loads[:, _LOOKUP] += self._index_seconds(table, ids, one)
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
        held = a.rows_T[table] * a.in_memory_T[table] * row
        held = held + touched * columns * VALUE_BYTES * a.trained_T[table]
        return held + a.outputs_T[table] * columns * VALUE_BYTES * (1 + a.trained_T[table])

    def id_travel_seconds(self, table_N: npt.NDArray[np.integer], share_N: Floats) -> Floats:
        """Return the seconds [N] that IDs travel to rectangles with `share_N` of their table's rows. Other
        work can hide this time.
        """
        sent = self._sent_ids(np.asarray(table_N), share_N)
        intra, inter = self.profile.intra, self.profile.inter
        travel: Floats = sent.inside_N / intra.all_to_all + sent.across_N / inter.all_to_all
        return travel

    @property
    def id_latency_seconds(self) -> float:
        """Seconds of latency of the two all-to-alls of sizes and of IDs."""
        return 2 * self._routes.latency if self.num_ranks > 1 else 0.0

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
            latency = self._routes.latency
            fixed[[_IDS, _OUTPUT, _GRADIENT]] += self.id_latency_seconds, latency, latency
            fixed[_ROW_STATS] = self._routes.outer.latency if usage.row_stats else 0.0
        else:  # routing has a fixed cost as well, which the latency of the all-to-alls includes
            fixed[_IDS] += p.kernel_seconds
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

    def _sent_rows(
        self, outputs: Floats, fetched: Floats, columns: Floats, row: RowOnWire, hops: Hops
    ) -> Sent:
        """Return the bytes of rectangles' rows, one way."""
        if self.rows_across:  # inside a node, all is fp32
            inside = outputs * columns * VALUE_BYTES * (self.node_size - 1) / self.node_size
            return Sent(inside, fetched * row.wire_bytes * (self.num_nodes - 1) / self.num_nodes)
        # The first of two hops goes to the rank of this node with the receiver's local rank. If all its ranks
        # hold a part of each row, only the sum of the parts takes the second hop.
        bytes_N = outputs * row.wire_bytes
        inside = bytes_N * np.where(hops.two_N, (self.node_size - 1) / self.node_size, self._routes.same_node)
        return Sent(inside, bytes_N * self._routes.other_nodes / np.where(hops.summed_N, self.node_size, 1))

    def _sent_ids(self, table: npt.NDArray[np.integer], share: Floats) -> Sent:
        """Return the bytes of IDs on their way to rectangles with `share` of their table's rows."""
        a = self.arrays
        ids = a.ids_T[table] * self.num_ranks * share
        message = ids * a.id_bytes_T[table] + a.bags_T[table] * self.num_ranks * LENGTH_BYTES
        if not self.rows_across:
            return Sent(message * self._routes.same_node, message * self._routes.other_nodes)
        distinct = self._fetched(table, ids, share) / self.num_nodes
        id_bytes: Floats | float = a.bare_id_bytes
        if self.topology.packed_ids:
            id_bytes = packed_id_bytes(a.rows_T[table] * share, distinct)
        inside = message * (self.node_size - 1) / self.node_size
        return Sent(inside, (self.num_nodes - 1) * distinct * id_bytes)

    def _fetched(self, table: npt.NDArray[np.integer], ids: Floats, share: Floats) -> Floats:
        """Return the rows that nodes fetch with ``across_nodes="rows"``: the distinct ones of each node."""
        return self.num_nodes * self._distinct(table, ids / self.num_nodes, share)

    def _add_node_work(self, loads: Floats, ids: Floats, fetched: Floats, columns: Floats) -> None:
        """Add the work of the ranks that stand for owners on other nodes, with ``across_nodes="rows"``.

        It is counted on the owner, as if all nodes had equal loads: duplicates are removed, bags are pooled
        from fetched rows, and the gradients of these are summed a second time.
        """
        p = self.profile
        loads[:, _IDS] += self._routes.once * ids * p.route_id_seconds
        if self.topology.packed_ids:
            loads[:, _IDS] += self._routes.once * 2 * fetched * p.scan_id_seconds
        loads[:, _LOOKUP] += ids * columns * VALUE_BYTES / p.stream_bandwidth
        loads[:, _UPDATE] += fetched * (p.update_id_seconds + columns * VALUE_BYTES / p.stream_bandwidth)

    def _embedding_seconds(self, sent: Sent, hops: Hops) -> Floats:
        intra = self.profile.intra
        speed = np.where(hops.summed_N, intra.reduce_scatter, intra.all_to_all)
        result: Floats = sent.inside_N / speed + sent.across_N / self.profile.inter.all_to_all
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
        result: Floats = state + self.arrays.row_bytes_T[table] + self.arrays.index_bytes_T[table]
        return result

    def _index_seconds(self, table: npt.NDArray[np.integer], ids: Floats, share: Floats) -> Floats:
        """Return the seconds [N] in which hashed keys find their slots: the keys are sorted, as for an
        update, and a cache line of the index is read for each distinct one.
        """
        p = self.profile
        line = p.read_row_seconds + _LINE_BYTES / p.read_bandwidth
        seconds = ids * p.update_id_seconds + self._distinct(table, ids, share) * line
        found: Floats = np.where(self.arrays.index_bytes_T[table] > 0, seconds, 0.0)
        return found

    def _column_bytes(self, table: npt.NDArray[np.integer]) -> Floats:
        state: Floats = STATE_BYTES * self.arrays.state_per_column_T[table]
        result: Floats = self.arrays.weight_bytes_T[table] + state
        return result


_LINE_BYTES = 64
_FORWARD = [_IDS, _LOOKUP, _OUTPUT]
_IS_EXCHANGE = np.isin(np.arange(NUM_PHASES), [_IDS, _OUTPUT, _GRADIENT])
