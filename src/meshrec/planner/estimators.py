"""Cost model: predicts the seconds per phase, and the memory, that a rectangle of a table costs its rank.

A rectangle is a row range and column range of a table, held by a rank. A training step is a chain of
phases (`PHASES`). Each phase is a collective or ends in one, so all ranks wait for the slowest. The step
therefore takes the sum over phases of the slowest rank's time. Within a phase, the load of a rank is the sum
over the rank's rectangles, plus the cost for data-parallel tables, which is equal on all ranks.

Transfers are counted on the owner, the rank that holds the rectangle, because the batch is spread evenly: in
an all-to-all of embeddings, owners send different amounts, and every rank receives the mean amount. For IDs
and gradients, every rank sends the mean amount, and owners receive different amounts. So the slowest owner
determines the duration if a rank sends and receives at once (full duplex). Otherwise the mean is added, see
`CostModel.shared_loads`.

Local names: ``a`` is `CostModel.arrays`, ``p`` is the hardware profile. ``share`` is the fraction of a
table's rows in a rectangle. For array names such as ``load_RK``, see [Note: planner arrays] in
``problem.py``.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshrec.comms.wire import FP32, WireFormats
from meshrec.planner.hardware import Link
from meshrec.planner.travel import Hops, RowOnWire, Sent, packed_id_bytes, routes_of
from meshrec.planner.types import STATE_BYTES, Bools, Floats, Ints, Table, Topology

PHASES = ("ids", "lookup", "output", "gradient", "row_stats", "replicas", "data_parallel", "update")
"""Phases of a step, in order:

- ids: all-to-alls of sizes and IDs.
- lookup: forward kernel.
- output, gradient: all-to-alls of embeddings and of their gradients.
- row_stats: all-reduce of row statistics for tables split by columns.
- replicas: exchange of sparse gradients over the ``replicate`` axis.
- data_parallel: exchange for data-parallel tables.
- update: fused optimizer step.
"""
NUM_PHASES = len(PHASES)
# Positions in `PHASES`, for indexing arrays with an axis of phases.
_IDS, _LOOKUP, _OUTPUT, _GRADIENT, _ROW_STATS, _REPLICAS, _DATA_PARALLEL, _UPDATE = range(NUM_PHASES)

LENGTH_BYTES = 4
"""Bytes per bag length sent with the IDs."""
VALUE_BYTES = FP32.value_bytes
"""Bytes per fp32 value. Results, gradient sums and exchanges between replicas are fp32. Exchanges between
replicas have no shorter wire format, because replicas must apply bit-identical updates.
"""
# Positions in `WireFormats`: the format for embeddings, and the format for gradients.
_FORWARD_WIRE, _BACKWARD_WIRE = range(2)
# Passes over row statistics: copy, sum, divide, sort.
_STATISTICS_PASSES = 4


class UsedCollectives(NamedTuple):
    """Collectives in a step, which follow from the kinds of tables in the plan.

    Attributes:
        sharded: at least one table is sharded, so the step exchanges IDs, embeddings and gradients.
        row_stats: at least one table is split by columns, and its optimizer needs a sum over whole rows. The
            column shards all-reduce this row statistic before the update.
        data_parallel: at least one table is replicated on every rank, so the step exchanges its gradients.
    """

    sharded: bool
    row_stats: bool
    data_parallel: bool


class Rectangles(NamedTuple):
    """Sizes of N rectangles (row range x column range of a table), whose position does not matter."""

    table_N: npt.NDArray[np.integer]
    """Table index per rectangle."""
    rows_N: Floats
    """Rows per rectangle; may be fractions."""
    columns_N: Floats
    in_node_N: Bools
    """Whether every rank of the rectangle's node holds other rows with the same columns, so that partial sums
    are reduced within the node."""


class CostModel:
    """Model of what rectangles of the tables cost the ranks that hold them, in seconds and bytes.

    Args:
        topology: the machine. The `world_size` ranks form `replicas` shard groups, which all follow the same
            plan.
    """

    def __init__(
        self, tables: Sequence[Table], topology: Topology, *, batch_size: int, replicas: int = 1
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1 sample per rank.")
        if topology.world_size % replicas:
            raise ValueError(
                f"{replicas} replicas do not divide {topology.world_size} ranks. Choose a divisor."
            )
        self.tables = tuple(tables)
        self.topology = topology
        self.batch_size = batch_size
        self.replicas = replicas
        self.profile = topology.profile
        # Ranks in a shard group. All groups have the same plan and load.
        self.num_ranks = topology.world_size // replicas
        # A group may be smaller than a node.
        self.node_size = min(topology.local_size, self.num_ranks)
        sums = topology.sum_in_node and not self.rows_across
        # Only with several ranks per node and several nodes.
        self.sum_in_node = sums and 1 < self.node_size < self.num_ranks
        self.memory_cap = topology.memory_cap
        self.arrays = arrays_of(self.tables, batch_size)
        self._routes = routes_of(topology, self.num_ranks, self.node_size, rows_across=self.rows_across)

    @property
    def num_nodes(self) -> int:
        """Nodes in a shard group."""
        return self.num_ranks // self.node_size

    @property
    def rows_across(self) -> bool:
        """Whether nodes send distinct rows, which are pooled after their arrival, rather than pooled sums."""
        return self.topology.across_nodes == "rows" and self.num_nodes > 1

    def rectangle_loads(self, rectangles: Rectangles) -> Floats:
        """Return the seconds which every rectangle costs its rank in every phase.

        Returns:
            Seconds, float64 [N, NUM_PHASES], without latencies.
        """
        a, p = self.arrays, self.profile
        table, rows, columns, in_node = rectangles
        share = rows / a.rows_T[table]
        # IDs that arrive here from all ranks of the shard group. Hot rows are assumed to be spread evenly
        # over the rows, so a rectangle gets the same fraction of the IDs as of the rows.
        ids = a.ids_T[table] * self.num_ranks * share
        bags = a.bags_T[table] * self.num_ranks
        outputs = np.where(a.pooled_T[table], bags, ids)
        row_bytes = columns * a.weight_bytes_T[table] + a.row_bytes_T[table]
        loads = np.zeros((len(table), NUM_PHASES))
        loads[:, _IDS] = self.id_travel_seconds(table, share)
        per_id = p.route_id_seconds + np.where(share < 1, p.split_id_seconds, 0.0)
        loads[:, _IDS] += self._routes.exchange_work_factor * ids * per_id
        # Only used with across_nodes="rows".
        fetched = self._fetched(table, ids, share)
        # With ``across_nodes="rows"``, the owner reads and encodes every distinct row once per node.
        # Otherwise it reads a row per ID, and encodes a row per bag.
        looked_up, encoded = (fetched, fetched) if self.rows_across else (ids, outputs)
        read = looked_up * (p.read_row_seconds + row_bytes / p.read_bandwidth)
        # Values which leave the rectangle in forward, and return as gradients.
        elements = outputs * columns
        hops = self._hops(table, in_node)
        for direction, phase in ((_FORWARD_WIRE, _OUTPUT), (_BACKWARD_WIRE, _GRADIENT)):
            row = self._row_on_wire(table, columns, direction)
            sent = self._sent_rows(outputs, fetched, columns, row, hops)
            loads[:, phase] = self._embedding_seconds(sent, hops)
            # The receiver reorders results by table, and the sender splits gradients. A rank copies its
            # local part instead of sending it. The batch is spread evenly, so this work is counted on
            # the rank which holds the rectangle.
            kernel = encoded * columns * row.kernel_bytes
            passes = elements * VALUE_BYTES + kernel + 2 * kernel / self.num_ranks
            # Formats which are more than a cast need another pass at both ends.
            passes += np.where(row.is_cast, 0.0, 2 * (kernel + encoded * row.wire_bytes))
            loads[:, phase] += self._routes.exchange_work_factor * passes / p.stream_bandwidth
            if direction == _FORWARD_WIRE:
                loads[:, _LOOKUP] = read + kernel / p.stream_bandwidth
        loads[:, _LOOKUP] += self._index_seconds(table, ids, share)
        loads[:, _UPDATE] = self._update_seconds(table, ids, columns, share, self.replicas)
        if self.rows_across:
            self._add_node_work(loads, ids, fetched, columns)
        if self.replicas > 1:
            loads[:, _REPLICAS] = self._replica_seconds(table, ids, columns, share)
        distinct = self._distinct(table, ids, share)
        # Tables whose optimizer needs no row statistics have 0 bytes here.
        sums = distinct * a.row_statistics_bytes_T[table]
        # An all-reduce sends every byte twice: to the summing rank, and back.
        statistics = 2 * sums * self._routes.seconds_per_byte
        is_split = self.needs_row_stats(table, columns)
        # Row statistics are exchanged between the sum of gradients and the update.
        if p.sorts_once:  # sorted IDs are reused; gradients are read twice
            # Sums are copied for peers, reduced, divided, and sorted.
            statistics += p.statistics_seconds + _STATISTICS_PASSES * 2 * sums / p.stream_bandwidth
            again = elements * VALUE_BYTES / p.stream_bandwidth
        else:  # the sums of gradients are written and read
            summed = distinct * columns * VALUE_BYTES / p.stream_bandwidth
            statistics += summed
            again = 2 * summed
        # A rectangle with all columns of its rows knows the whole row gradient, and needs no exchange.
        loads[:, _ROW_STATS] = np.where(is_split, statistics, 0.0)
        loads[:, _UPDATE] += np.where(is_split, again + distinct * p.update_id_seconds, 0.0)
        return self._without_backward(table, loads)

    def needs_row_stats(self, table_N: npt.NDArray[np.integer], columns_N: npt.NDArray[np.number]) -> Bools:
        """Return for every rectangle whether its update needs an all-reduce of row statistics.

        An update needs it if the rectangle has a part of the columns, and the optimizer needs a sum over
        whole rows.
        """
        a = self.arrays
        has_stats = a.trained_T[table_N] & (a.row_statistics_bytes_T[table_N] > 0)
        result: Bools = has_stats & (columns_N < a.columns_T[table_N])
        return result

    def rectangle_bytes(self, rectangles: Rectangles) -> Floats:
        """Return the bytes which every rectangle takes on the rank holding it.

        The bytes are for weights, optimizer state, incoming IDs, and the buffers for outgoing embeddings and
        incoming gradients.

        Returns:
            Bytes, float64 [N].
        """
        a = self.arrays
        table, rows, columns, _ = rectangles
        ids = a.ids_T[table] * self.num_ranks * rows / a.rows_T[table]
        bags = a.bags_T[table] * self.num_ranks
        outputs = np.where(a.pooled_T[table], bags, ids)
        parameters = rows * (columns * self._column_bytes(table) + self._row_bytes(table))
        # The remaining bytes of tables in files are on the disk.
        parameters = parameters * self.arrays.in_memory_T[table]
        # IDs as they arrived, and unpacked.
        buffers = 2 * ids * a.id_bytes_T[table] + bags * LENGTH_BYTES
        if self.rows_across:
            outputs = outputs + self._fetched(table, ids, rows / a.rows_T[table])
        result: Floats = parameters + buffers + outputs * self._row_buffers(table, columns)
        return result

    def received_bytes(self, rectangles: Rectangles) -> Floats:
        """Return the bytes for the outputs and gradients of every rectangle on *every* rank.

        The bytes are for the rank's own samples: buffers to receive embeddings and to send gradients. All
        ranks need them, in addition to `rectangle_bytes` on the rank that holds the rectangle.

        Returns:
            Bytes per rank, float64 [N].
        """
        a = self.arrays
        table, rows, columns, in_node = rectangles
        share = rows / a.rows_T[table]
        outputs = np.where(a.pooled_T[table], a.bags_T[table], a.ids_T[table] * share)
        parts = np.where(self._hops(table, in_node).summed_N, 1.0 / self.node_size, 1.0)
        result: Floats = outputs * parts * self._row_buffers(table, columns)
        return result

    def sent_bytes(self, rectangles: Rectangles) -> dict[str, Sent]:
        """Return the encoded bytes sent per step for every rectangle, summed over all sending ranks.

        The small all-to-all that announces message sizes is not included.

        Returns:
            Bytes by exchange, which is ``"ids"``, ``"output"`` (embeddings) or ``"gradient"``.
        """
        a = self.arrays
        table, rows, columns, in_node = rectangles
        share = rows / a.rows_T[table]
        ids = a.ids_T[table] * self.num_ranks * share
        outputs = np.where(a.pooled_T[table], a.bags_T[table] * self.num_ranks, ids)
        fetched, hops = self._fetched(table, ids, share), self._hops(table, in_node)
        by_exchange = {"ids": self._sent_ids(table, share)}
        for direction, name, counts in (
            (_FORWARD_WIRE, "output", np.ones(len(table))),
            # Untrained tables send no gradients.
            (_BACKWARD_WIRE, "gradient", a.trained_T[table]),
        ):
            row = self._row_on_wire(table, columns, direction)
            sent = self._sent_rows(outputs, fetched, columns, row, hops)
            by_exchange[name] = Sent(*(counts * sizes for sizes in sent))
        return by_exchange

    def replicated_loads(self, table_N: npt.NDArray[np.integer]) -> Floats:
        """Return the seconds [N, NUM_PHASES] which data-parallel tables cost every rank, by table index."""
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
        # Data-parallel tables are replicated over all ranks, including other replica groups.
        world = self.topology.world_size
        loads[:, _UPDATE] = self._update_seconds(table, ids, columns, one, world)
        summed = a.rows_T[table] * columns * VALUE_BYTES
        # All-reduce of the whole table's gradient.
        dense = 2 * (world - 1) / world * summed / self._routes.all_ranks.all_reduce
        sparse = self._gather_seconds(table, ids, a.outputs_T[table] * columns, world, self._routes.all_ranks)
        # A small table touched in most rows is cheaper as a dense all-reduce, a large one as a gather of the
        # touched rows.
        loads[:, _DATA_PARALLEL] = np.minimum(dense, sparse)
        return self._without_backward(table, loads)

    def replicated_bytes(self, table_N: npt.NDArray[np.integer]) -> Floats:
        """Return the bytes [N] which data-parallel tables take on every rank, by table index.

        Includes optimizer state, outputs and gradients.
        """
        a = self.arrays
        table = np.asarray(table_N)
        columns = a.columns_T[table].astype(np.float64)
        row = columns * self._column_bytes(table) + self._row_bytes(table)
        touched = np.minimum(a.rows_T[table], a.ids_T[table] * self.topology.world_size)
        # Gradients of data-parallel tables are stored for the touched rows only.
        held = a.rows_T[table] * a.in_memory_T[table] * row
        held = held + touched * columns * VALUE_BYTES * a.trained_T[table]
        return held + a.outputs_T[table] * columns * VALUE_BYTES * (1 + a.trained_T[table])

    def id_travel_seconds(self, table_N: npt.NDArray[np.integer], share_N: Floats) -> Floats:
        """Return the seconds [N] for sending IDs to N rectangles with the fraction `share_N` of the rows.

        A train pipeline can overlap this time with the previous batch, see `StepEstimate.pipelined_seconds`.
        """
        sent = self._sent_ids(np.asarray(table_N), share_N)
        intra, inter = self.profile.intra, self.profile.inter
        travel: Floats = sent.inside_N / intra.all_to_all + sent.across_N / inter.all_to_all
        return travel

    @property
    def id_latency_seconds(self) -> float:
        """Latency in seconds of the two ID all-to-alls: first the message sizes, then the IDs."""
        return 2 * self._routes.latency if self.num_ranks > 1 else 0.0

    def shared_loads(self, mean_loads: Floats) -> Floats:
        """Return the seconds [NUM_PHASES] to add on every rank because it cannot send and receive at once.

        The load of a rank counts an exchange in a single direction; see the module docstring. In the other
        direction, every rank transfers the mean amount. In half duplex, the seconds for this amount are
        added. In full duplex, both directions overlap, and the result is 0.

        Args:
            mean_loads: rectangle loads [NUM_PHASES], averaged over all ranks.
        """
        if self.profile.full_duplex:
            return np.zeros(NUM_PHASES)
        return np.where(_IS_EXCHANGE, mean_loads, 0.0)

    def fixed_seconds(self, usage: UsedCollectives) -> Floats:
        """Return the seconds [NUM_PHASES] which every plan with these collectives takes.

        The time is spent on kernel launches, the scan of a rank's IDs, and the latencies of collectives.
        """
        fixed = np.zeros(NUM_PHASES)
        a, p = self.arrays, self.profile
        fixed[[_LOOKUP, _UPDATE]] = p.kernel_seconds
        fixed[_IDS] = a.ids_T.sum() * p.scan_id_seconds + a.bags_T.sum() * p.scan_bag_seconds
        if self.num_ranks > 1:  # all-to-alls run even without data
            latency = self._routes.latency
            fixed[[_IDS, _OUTPUT, _GRADIENT]] += self.id_latency_seconds, latency, latency
            fixed[_ROW_STATS] = self._routes.outer.latency if usage.row_stats else 0.0
        else:  # routing has a fixed cost, which the all-to-all latency includes otherwise
            fixed[_IDS] += p.kernel_seconds
        if self.replicas > 1 and usage.sharded:
            fixed[_REPLICAS] = 2 * self._routes.all_ranks.latency
        if self.topology.world_size > 1 and usage.data_parallel:
            fixed[_DATA_PARALLEL] = self._routes.all_ranks.latency
        return fixed

    def _hops(self, table: npt.NDArray[np.integer], in_node_N: Bools) -> Hops:
        """Return for every rectangle whether its rows take two hops, and whether the first hop sums them.

        Rows take two hops (within the node, then between nodes) if partial sums are to be added in the node.
        Only pooled rows can be summed, so other rows take one hop.
        """
        two = self.arrays.pooled_T[table] & self.sum_in_node
        return Hops(two, two & in_node_N)

    def _sent_rows(
        self, outputs: Floats, fetched: Floats, columns: Floats, row: RowOnWire, hops: Hops
    ) -> Sent:
        """Return the encoded bytes which every rectangle sends as embeddings, or receives as gradients.

        Args:
            outputs: rows [N] after pooling.
            fetched: distinct rows [N] per node, summed over nodes; used with ``across_nodes="rows"``.
            columns: columns [N].
        """
        if self.rows_across:  # inside a node, all is fp32
            inside = outputs * columns * VALUE_BYTES * (self.node_size - 1) / self.node_size
            return Sent(inside, fetched * row.wire_bytes * (self.num_nodes - 1) / self.num_nodes)
        # The first hop goes to the rank in this node with the receiver's local rank. If all ranks in the node
        # hold a part of each row, only the sum takes the second hop.
        bytes_N = outputs * row.wire_bytes
        inside = bytes_N * np.where(hops.two_N, (self.node_size - 1) / self.node_size, self._routes.same_node)
        return Sent(inside, bytes_N * self._routes.other_nodes / np.where(hops.summed_N, self.node_size, 1))

    def _sent_ids(self, table: npt.NDArray[np.integer], share: Floats) -> Sent:
        """Return the bytes of IDs and bag lengths which every rectangle receives, within and between nodes.

        `share` is the fraction of the table's rows in the rectangle.
        """
        a = self.arrays
        ids = a.ids_T[table] * self.num_ranks * share
        message = ids * a.id_bytes_T[table] + a.bags_T[table] * self.num_ranks * LENGTH_BYTES
        if not self.rows_across:
            return Sent(message * self._routes.same_node, message * self._routes.other_nodes)
        # Every node sends distinct IDs once for all ranks.
        distinct = self._fetched(table, ids, share) / self.num_nodes
        id_bytes: Floats | float = a.bare_id_bytes
        if self.topology.packed_ids:
            id_bytes = packed_id_bytes(a.rows_T[table] * share, distinct)
        # First to the representative in the sender's node, with duplicates.
        inside = message * (self.node_size - 1) / self.node_size
        return Sent(inside, (self.num_nodes - 1) * distinct * id_bytes)

    def _fetched(self, table: npt.NDArray[np.integer], ids: Floats, share: Floats) -> Floats:
        """Return how many distinct rows every rectangle sends to nodes, summed over all nodes [N].

        Used with ``across_nodes="rows"``, where a rectangle sends a row at most once to every node.
        """
        return self.num_nodes * self._distinct(table, ids / self.num_nodes, share)

    def _add_node_work(self, loads: Floats, ids: Floats, fetched: Floats, columns: Floats) -> None:
        """Increase `loads` by the time for work that is needed only with ``across_nodes="rows"``.

        In every other node, a representative of the rectangle's rank removes duplicate IDs, pools the fetched
        rows, and sums row gradients before sending them. All nodes are assumed to have equal loads, so the
        time of the representatives is simply added to the rectangle's own load.
        """
        p = self.profile
        loads[:, _IDS] += self._routes.exchange_work_factor * ids * p.route_id_seconds
        if self.topology.packed_ids:
            loads[:, _IDS] += self._routes.exchange_work_factor * 2 * fetched * p.scan_id_seconds
        loads[:, _LOOKUP] += ids * columns * VALUE_BYTES / p.stream_bandwidth
        loads[:, _UPDATE] += fetched * (p.update_id_seconds + columns * VALUE_BYTES / p.stream_bandwidth)

    def _embedding_seconds(self, sent: Sent, hops: Hops) -> Floats:
        """Return the seconds [N] for sending embeddings or gradients.

        Within a node, rows travel by reduce-scatter if they are summed there, otherwise by all-to-all.
        """
        intra = self.profile.intra
        speed = np.where(hops.summed_N, intra.reduce_scatter, intra.all_to_all)
        result: Floats = sent.inside_N / speed + sent.across_N / self.profile.inter.all_to_all
        return result

    def _update_seconds(
        self, table: npt.NDArray[np.integer], ids: Floats, columns: Floats, share: Floats, replicas: int
    ) -> Floats:
        """Return the seconds [N] for fused updates of rectangles.

        The update sums the gradients of all lookups by table row. Then it reads and writes weights and
        optimizer state of every distinct row. Rows looked up in any replica count.
        """
        a, p = self.arrays, self.profile
        distinct = self._distinct(table, ids * replicas, share)
        outputs = np.where(a.pooled_T[table], a.bags_T[table] * self.num_ranks, ids)
        # Sort the IDs, and read their gradients.
        gather = ids * p.update_id_seconds + outputs * columns * VALUE_BYTES / p.stream_bandwidth
        row_bytes = columns * (2 * a.weight_bytes_T[table] + 2 * STATE_BYTES * a.state_per_column_T[table])
        result: Floats = gather + distinct * (p.update_row_seconds + row_bytes / p.update_bandwidth)
        return result

    def _replica_seconds(
        self, table: npt.NDArray[np.integer], ids: Floats, columns: Floats, share: Floats
    ) -> Floats:
        """Return the seconds [N] to exchange gradients between replicas.

        The faster of two methods counts: an all-gather of sparse gradients, or a dense all-reduce.
        """
        rows, pooled = self.arrays.rows_T[table] * share, self.arrays.pooled_T[table]
        outputs = np.where(pooled, self.arrays.bags_T[table] * self.num_ranks, ids)
        peers, link = self.replicas - 1, self._routes.all_ranks
        sparse = self._gather_seconds(table, ids, outputs * columns, self.replicas, link)
        # A ring all-reduce sends every value twice, except the part that a rank holds itself.
        dense = 2 * peers / self.replicas * rows * columns * VALUE_BYTES / link.all_reduce
        # The cheaper way is counted: gradients of the rows that were read, or of the whole table.
        result: Floats = np.minimum(sparse, dense)
        return result

    def _gather_seconds(
        self, table: npt.NDArray[np.integer], ids: Floats, elements: Floats, ranks: int, link: Link
    ) -> Floats:
        """Return the seconds [N] for an all-gather of IDs and output gradients, packed and unpacked."""
        sent = ids * self.arrays.id_bytes_T[table] + elements * VALUE_BYTES
        # A rank packs its own message, and unpacks one per rank.
        passes = 2 * (1 + ranks) * sent / self.profile.stream_bandwidth
        result: Floats = (ranks - 1) * sent / link.reduce_scatter + (passes if ranks > 1 else 0.0)
        return result

    def _distinct(self, table: npt.NDArray[np.integer], ids: Floats, share: Floats) -> Floats:
        """Return the expected number of distinct rows [N] which lookups touch in every rectangle.

        Lookups are modeled as uniform draws from the effective rows, see `Table.effective_rows`.
        """
        # rows * (1 - exp(-ids / rows)): the limit of draws with replacement for many rows.
        rows = np.maximum(self.arrays.effective_rows_T[table] * share, 1e-9)
        distinct: Floats = rows * -np.expm1(-ids / rows)
        return distinct

    def _without_backward(self, table: npt.NDArray[np.integer], loads: Floats) -> Floats:
        """Return a copy of the loads in which untrained tables cost nothing after the forward phases."""
        is_forward = np.isin(np.arange(NUM_PHASES), _FORWARD)
        result: Floats = np.where(self.arrays.trained_T[table][:, None] | is_forward, loads, 0.0)
        return result

    def _row_on_wire(self, table: npt.NDArray[np.integer], columns: Floats, direction: int) -> RowOnWire:
        """Return the encoded size of rows with ``columns`` values, in the tables' wire formats.

        `direction` is `_FORWARD_WIRE` for embeddings or `_BACKWARD_WIRE` for gradients.
        """
        formats = [wire[direction] for wire in self.arrays.wires]
        index = self.arrays.wires_T[table]
        value_bytes = np.array([wire_format.value_bytes for wire_format in formats], np.float64)[index]
        overhead = np.array([wire_format.row_overhead for wire_format in formats], np.float64)[index]
        kernel_bytes = np.array([wire_format.kernel_dtype.itemsize for wire_format in formats], np.float64)[
            index
        ]
        is_cast = np.array([wire_format.is_cast for wire_format in formats], bool)[index]
        return RowOnWire(np.ceil(columns * value_bytes) + overhead, kernel_bytes, is_cast)

    def _row_buffers(self, table: npt.NDArray[np.integer], columns: Floats) -> Floats:
        """Return the bytes [N] for buffering an output row, and its gradient if the table is trained."""
        num_bytes = np.zeros(len(table))
        for direction, counts in ((_FORWARD_WIRE, 1.0), (_BACKWARD_WIRE, self.arrays.trained_T[table])):
            row = self._row_on_wire(table, columns, direction)
            num_bytes += counts * (row.wire_bytes + np.where(row.is_cast, 0.0, columns * row.kernel_bytes))
        return num_bytes

    def _row_bytes(self, table: npt.NDArray[np.integer]) -> Floats:
        """Return the stored bytes per row [N] that do not depend on the column count.

        The bytes hold optimizer state, `Table.row_bytes` and the hash index.
        """
        state: Floats = STATE_BYTES * self.arrays.state_per_row_T[table]
        result: Floats = state + self.arrays.row_bytes_T[table] + self.arrays.index_bytes_T[table]
        return result

    def _index_seconds(self, table: npt.NDArray[np.integer], ids: Floats, share: Floats) -> Floats:
        """Return the index lookup seconds per rectangle [N]; 0 if the table has no hash index.

        A lookup sorts the IDs, at the same cost per ID as an update. Then it reads one cache line of the
        index per distinct ID.
        """
        p = self.profile
        line = p.read_row_seconds + _LINE_BYTES / p.read_bandwidth
        seconds = ids * p.update_id_seconds + self._distinct(table, ids, share) * line
        result: Floats = np.where(self.arrays.index_bytes_T[table] > 0, seconds, 0.0)
        return result

    def _column_bytes(self, table: npt.NDArray[np.integer]) -> Floats:
        """Return the stored bytes [N] per table element, which are weight and optimizer state."""
        state: Floats = STATE_BYTES * self.arrays.state_per_column_T[table]
        result: Floats = self.arrays.weight_bytes_T[table] + state
        return result


# Bytes per CPU cache line.
_LINE_BYTES = 64
# Phases that run for untrained tables, too.
_FORWARD = [_IDS, _LOOKUP, _OUTPUT]
# Mask [NUM_PHASES] of the all-to-all phases.
_IS_EXCHANGE = np.isin(np.arange(NUM_PHASES), [_IDS, _OUTPUT, _GRADIENT])
ID_BYTES, WIDE_ID_BYTES = 4, 8
"""Bytes per ID on the wire, and for tables with 64-bit keys or too many rows for 32 bits."""
# Row count above which all IDs of a module are sent as 64-bit integers.
_WIDE_ROWS = 1 << 31
# Per-sample weights are fp32, and are sent with the IDs.
SAMPLE_WEIGHT_BYTES = 4
STATISTIC_BYTES = 4
"""Bytes per row statistic, an fp32 value such as the sum of squared gradients of row-wise Adagrad."""


class TableArrays(NamedTuple):
    """Attributes of T tables as arrays, so that the cost model can price many rectangles at once.

    Fields without a docstring are the `Table` attributes with the same name. ``rows_T`` and ``columns_T`` are
    ``num_embeddings`` and ``embedding_dim``.
    """

    rows_T: Ints
    columns_T: Ints
    ids_T: Floats
    """Mean ID count in the batch of a rank."""
    bags_T: Floats
    """Mean number of bags in the batch of a rank."""
    outputs_T: Floats
    """Mean row count returned by a lookup for the batch of a rank: a row per bag (pooled) or per ID."""
    pooled_T: Bools
    weight_bytes_T: Floats
    row_bytes_T: Floats
    in_memory_T: Floats
    index_bytes_T: Floats
    trained_T: Bools
    id_bytes_T: Floats
    """Bytes per ID when sent between ranks, including the per-sample weight of weighted tables."""
    bare_id_bytes: int
    """Bytes per ID when sent between ranks, without per-sample weight. Equal for all tables in a module."""
    state_per_column_T: Floats
    """Optimizer state values (fp32) per row and column."""
    state_per_row_T: Floats
    """Optimizer state values (fp32) per row, independent of the column count."""
    wires_T: Ints
    """Index in ``wires`` of the table's wire formats."""
    wires: list[WireFormats]
    """Distinct wire formats used by the tables."""
    row_statistics_bytes_T: Floats
    """Bytes per distinct row which column shards all-reduce before the update, because the optimizer needs a
    statistic of the whole row's gradient. 0 for optimizers without such a statistic.
    """
    effective_rows_T: Floats


def arrays_of(tables: Sequence[Table], batch_size: int) -> TableArrays:
    """Convert tables to arrays. `batch_size` is the sample count per rank for tables that set none."""
    batch = np.array([table.batch_size or batch_size for table in tables], np.float64)
    ids = batch * [table.ids_per_sample for table in tables]
    bags = batch * [table.bags_per_sample for table in tables]
    rows = np.array([table.num_embeddings for table in tables], np.int64)
    hashed = any(table.index_bytes for table in tables)  # keys have 64 bits
    id_bytes = WIDE_ID_BYTES if hashed or (rows >= _WIDE_ROWS).any() else ID_BYTES
    # Sorted, because set iteration has no fixed order.
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
        in_memory_T=np.array([table.in_memory for table in tables], np.float64),
        index_bytes_T=np.array([table.index_bytes for table in tables], np.float64),
        trained_T=np.array([table.trained for table in tables], bool),
        id_bytes_T=np.array(
            [id_bytes + SAMPLE_WEIGHT_BYTES * table.weighted for table in tables], np.float64
        ),
        bare_id_bytes=id_bytes,
        state_per_column_T=np.array([table.optimizer.state_per_row[0] for table in tables], np.float64),
        state_per_row_T=np.array([table.optimizer.state_per_row[1] for table in tables], np.float64),
        wires_T=np.array([wires.index(table.wire) for table in tables], np.int64),
        wires=wires,
        row_statistics_bytes_T=np.array(
            [STATISTIC_BYTES * table.optimizer.row_statistics for table in tables], np.float64
        ),
        effective_rows_T=np.minimum(hot, rows),
    )
