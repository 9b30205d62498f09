"""Path for IDs and rows between ranks, for the cost model."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshrec.ops.dist.ids_naive import GROUP
from meshrec.planner.hardware import Link
from meshrec.planner.types import Bools, Floats, Topology


class RowOnWire(NamedTuple):
    """Encoded sizes for N embedding or gradient rows.

    Attributes:
        wire_bytes: encoded row bytes.
        kernel_bytes: bytes per value as written by kernels.
        is_cast: whether kernels write the wire format directly, without a separate encoding.
    """

    wire_bytes: Floats
    kernel_bytes: Floats
    is_cast: Bools


class Hops(NamedTuple):
    """Row path from N rectangles to the requesting ranks.

    Attributes:
        two_N: whether rows take two hops: within a node, then between nodes.
        summed_N: whether all ranks of the node hold parts of the rows, so that only sums take the second hop.
    """

    two_N: Bools
    summed_N: Bools


class Sent(NamedTuple):
    """Bytes sent per rectangle [N], within and between nodes."""

    inside_N: Floats
    across_N: Floats


class GroupRoutes(NamedTuple):
    """Links between the ranks of a group, and the fractions of a batch which use them.

    Attributes:
        outer: slowest link within the group.
        replicas: slowest link between ranks with the same rectangles.
        all_ranks: slowest link between any two ranks.
        same_node: fraction of a rank's rows held by other ranks in the node.
        other_nodes: fraction of a rank's rows held by other nodes.
        wire: seconds per byte in an all-to-all, over both kinds of links.
        latency: seconds until an embedding exchange starts, over all hops.
        once: factor of work other than transfers; in half duplex, `shared_loads` adds the mean of a phase
            again.
    """

    outer: Link
    replicas: Link
    all_ranks: Link
    same_node: float
    other_nodes: float
    wire: float
    latency: float
    once: float


def routes_of(topology: Topology, num_ranks: int, node_size: int, *, rows_across: bool) -> GroupRoutes:
    """Return a rank group's links.

    Args:
        topology: machine.
        num_ranks: ranks in the group.
        node_size: ranks per node.
        rows_across: whether distinct rows cross the network instead of sums.
    """
    profile = topology.profile
    multi_node = topology.world_size > topology.local_size
    crosses_nodes = num_ranks >= topology.local_size and multi_node
    same_node, other_nodes = (node_size - 1) / num_ranks, (num_ranks - node_size) / num_ranks
    outer = profile.inter if num_ranks > node_size else profile.intra
    return GroupRoutes(
        outer=outer,
        replicas=profile.inter if crosses_nodes else profile.intra,
        all_ranks=profile.inter if multi_node else profile.intra,
        same_node=same_node,
        other_nodes=other_nodes,
        wire=same_node / profile.intra.all_to_all + other_nodes / profile.inter.all_to_all,
        latency=outer.latency + (profile.intra.latency if rows_across and node_size > 1 else 0.0),
        once=1.0 if profile.full_duplex else 0.5,
    )


def packed_id_bytes(num_rows_N: npt.ArrayLike, num_ids_N: npt.ArrayLike) -> Floats:
    """Return the expected bytes per packed ID in N runs, see ``ops/dist/ids_naive.py``; 0 without IDs.

    Gaps between random IDs are geometrically distributed, and the largest in a group determines the bits of
    all.

    Args:
        num_rows_N: rows from which the IDs of each run are drawn.
        num_ids_N: distinct IDs of each run, evenly spread over these rows.
    """
    rows, ids = np.asarray(num_rows_N, np.float64), np.asarray(num_ids_N, np.float64)
    group = np.clip(ids, 1.0, GROUP)
    used = np.minimum(ids / np.maximum(rows, 1e-9), 1.0)
    with np.errstate(divide="ignore"):  # all rows, or none
        largest = (np.log(group) + np.euler_gamma) / -np.log1p(-used)
    bits = np.maximum(np.log2(np.maximum(largest, 0.5)) + 0.5, 0.0)
    bits = np.where(used < 1.0, bits, 0.0)
    result: Floats = np.where(ids > 0.0, bits / 8 + 1.0 / group, 0.0)
    return result
