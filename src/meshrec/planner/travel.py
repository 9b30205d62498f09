"""The path of IDs and rows between ranks, for the cost model."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshrec.ops.dist.ids_naive import GROUP
from meshrec.planner.hardware import Link
from meshrec.planner.types import Bools, Floats, Topology


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


class Sent(NamedTuple):
    """The bytes that ranks send for each of N rectangles: inside their node, and between nodes."""

    inside_N: Floats
    across_N: Floats


class GroupRoutes(NamedTuple):
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
    latency: float
    """Seconds until an exchange of the embeddings begins, over all its hops."""
    once: float
    """Factor of work other than transfers. In half duplex, `shared_loads` adds the mean of a phase again."""


def routes_of(topology: Topology, num_ranks: int, node_size: int, *, rows_across: bool) -> GroupRoutes:
    """Return the links of a group of ranks, whose nodes have ``node_size`` of them."""
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
    """Return the expected bytes of a packed ID in N runs, see ``ops/dist/ids_naive.py``; 0 without IDs.

    Gaps between random IDs have a geometric distribution, and the largest of a group sets the bits of all.

    Args:
        num_rows_N: the rows that the IDs of each run are drawn from.
        num_ids_N: the distinct IDs of each run, evenly spread over these rows.
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
