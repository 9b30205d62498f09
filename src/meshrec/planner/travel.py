"""Bytes and links of the exchanges between ranks, for the cost model."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshrec.ops.dist.ids_naive import GROUP
from meshrec.planner.hardware import Link
from meshrec.planner.types import Bools, Floats, Topology


class RowOnWire(NamedTuple):
    """Bytes per embedding or gradient row when sent between ranks, for N rectangles.

    Attributes:
        wire_bytes: bytes per encoded row.
        kernel_bytes: bytes per value as written by the lookup kernel, before a separate encoding, if any.
        is_cast: whether encoding is only a cast, which the lookup kernel does itself. Other formats, such as
            int8 with a scale per row, need a separate pass.
    """

    wire_bytes: Floats
    kernel_bytes: Floats
    is_cast: Bools


class Hops(NamedTuple):
    """Path of embedding rows from N rectangles to the ranks that requested them.

    Attributes:
        two_N: whether rows take two hops instead of a direct one: within the owner's node, then between
            nodes.
        summed_N: whether all ranks of the owner's node hold rows with the same columns. Then their partial
            sums are added in the first hop, and only the total takes the second hop.
    """

    two_N: Bools
    summed_N: Bools


class Sent(NamedTuple):
    """Bytes [N] sent for every rectangle (shard of a table), within nodes and between nodes."""

    inside_N: Floats
    across_N: Floats


class GroupRoutes(NamedTuple):
    """Links between the ranks in a shard group, and how an all-to-all spreads over them.

    Attributes:
        outer: slowest link within the shard group.
        all_ranks: slowest link between any two ranks of the machine. Exchanges between replicas use it, too:
            on several nodes, the first and the last replica of a rectangle are always on different nodes.
        same_node: fraction sent to other ranks in the same node.
        other_nodes: fraction sent to other nodes.
        seconds_per_byte: seconds per byte in an all-to-all, over both kinds of links.
        latency: seconds until an embedding exchange starts, over all hops.
        exchange_work_factor: factor on the work in exchange phases that is not a transfer. It is 1 in full
            duplex and 0.5 in half duplex, where `CostModel.shared_loads` adds the phase's mean again. Without
            the factor, this work would count twice.
    """

    outer: Link
    all_ranks: Link
    same_node: float
    other_nodes: float
    seconds_per_byte: float
    latency: float
    exchange_work_factor: float


def routes_of(topology: Topology, num_ranks: int, node_size: int, *, rows_across: bool) -> GroupRoutes:
    """Return the links in a shard group, and how much of an all-to-all they carry.

    Args:
        rows_across: whether nodes exchange distinct rows instead of pooled sums, which adds an exchange
            within the node.
    """
    profile = topology.profile
    multi_node = topology.world_size > topology.local_size
    # A rank keeps 1 / num_ranks of an all-to-all for itself, so these two fractions do not sum to 1.
    same_node, other_nodes = (node_size - 1) / num_ranks, (num_ranks - node_size) / num_ranks
    outer = profile.inter if num_ranks > node_size else profile.intra
    return GroupRoutes(
        outer=outer,
        all_ranks=profile.inter if multi_node else profile.intra,
        same_node=same_node,
        other_nodes=other_nodes,
        seconds_per_byte=same_node / profile.intra.all_to_all + other_nodes / profile.inter.all_to_all,
        latency=outer.latency + (profile.intra.latency if rows_across and node_size > 1 else 0.0),
        exchange_work_factor=1.0 if profile.full_duplex else 0.5,
    )


def packed_id_bytes(num_rows_N: npt.ArrayLike, num_ids_N: npt.ArrayLike) -> Floats:
    """Return the expected bytes per bit-packed ID, for N sorted lists of IDs; 0 for an empty list.

    IDs are sent as gaps between successive IDs, in groups: see ``ops/dist/ids_naive.py``. All gaps in a group
    take as many bits as the largest. The gaps between random IDs are geometrically distributed, which gives
    the expected maximum.
    """
    rows, ids = np.asarray(num_rows_N, np.float64), np.asarray(num_ids_N, np.float64)
    group = np.clip(ids, 1.0, GROUP)
    used = np.minimum(ids / np.maximum(rows, 1e-9), 1.0)
    with np.errstate(divide="ignore"):  # all rows, or none
        largest = (np.log(group) + np.euler_gamma) / -np.log1p(-used)
    bits = np.maximum(np.log2(np.maximum(largest, 0.5)) + 0.5, 0.0)
    # If every row is requested, all gaps are equal, and take no bits.
    bits = np.where(used < 1.0, bits, 0.0)
    result: Floats = np.where(ids > 0.0, bits / 8 + 1.0 / group, 0.0)
    return result
