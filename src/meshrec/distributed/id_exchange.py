"""Exchange sorted IDs between nodes, packed into fewer bytes if that is faster.

The IDs are sorted, so the differences between neighbors need fewer bits than the IDs (see
``ops/dist/ids_naive.py``). Packing takes time at both ends, and saves network bytes. The first batch's IDs
are sent both ways, plain and packed, and the faster way is used for the whole run. A log line reports the
choice. Both ways give equal results.
"""

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from meshrec.comms.collectives import Splits, all_reduce, all_to_all
from meshrec.comms.mesh import Axis
from meshrec.ops import operators

# M: nodes, B: bands on a node

_logger = logging.getLogger("meshrec")
# Exchanges measured per way. The median of three ignores a slow first exchange.
_TRIALS = 3


class SortedIdExchange:
    """Exchange of IDs: every ID is sent to the node which has the row.

    IDs are sent in runs. A run contains the distinct IDs in a band, ascending, where a band is a row interval
    of a table.

    Args:
        node: the ranks with this rank's local rank, one per node.
        num_bands: for every node, the number of bands which its rank in ``node`` has. A message to that rank
            contains a run per band.
        wide: whether IDs need 64 bits.

    Attributes:
        packs: whether IDs are packed; None until the first batch decides it.
    """

    def __init__(self, node: Axis, num_bands: Sequence[int], *, wide: bool) -> None:
        self._node, self._num_bands, self._wide = node, list(num_bands), wide
        self.packs: bool | None = None if node.group is not None and node.size > 1 else False

    def exchange(self, ids: Tensor, sent: Sequence[Sequence[int]]) -> tuple[Tensor, list[list[int]]]:
        """Send runs to all nodes, and return the runs received from all nodes. Collective.

        Args:
            ids: IDs in all runs to send, int64 [N], node by node.
            sent: ``sent[node][run]`` is the number of IDs in a run to ``node``.

        Returns:
            The received IDs, node by node, and ``received[node][run]``, the number of IDs in a run from
            ``node``.
        """
        # Plain IDs take 4 bytes if they fit, so packing is compared with the shorter form.
        ids = ids.to(torch.int64 if self._wide else torch.int32)
        if not ids.is_cpu and self.packs is None:
            self._choose(False, "IDs on a GPU are not packed")
        began = time.perf_counter()
        packed, byte_counts = self._pack(ids, sent) if self.packs is not False else (ids, [])
        packing = time.perf_counter() - began
        counts, received_bytes = self._exchange_sizes(sent, byte_counts, ids.device)
        plain = Splits(
            list(map(sum, sent)),
            list(map(sum, counts)),
        )
        coded = Splits(byte_counts, received_bytes)

        def send_plain() -> Tensor:
            """Exchange the IDs without packing, and return the received IDs."""
            return all_to_all(ids, plain, self._node, "ids between nodes").wait()

        def send_packed() -> Tensor:
            """Exchange the packed IDs, and return the received IDs, unpacked."""
            message = all_to_all(packed, coded, self._node, "ids between nodes").wait()
            arrived = [n for lengths in counts for n in lengths]
            unpacked: Tensor = operators.unpack_sorted_ids(message, arrived, self._wide)
            return unpacked

        if self.packs is None:
            seconds = torch.tensor([_median(send_plain), packing + _median(send_packed)], dtype=torch.float64)
            # All ranks on the axis must choose alike, or their collectives would not match.
            all_reduce(seconds, self._node, "seconds of ids between nodes")
            plain_ms, packed_ms = (1e3 * seconds / self._node.size).tolist()
            size = packed.numel() / max(len(ids), 1)
            self._choose(
                is_faster(plain_ms, packed_ms),
                f"packing them takes {size:.2f} bytes each in place of {ids.element_size()}, and "
                f"{packed_ms:.2f} ms in place of {plain_ms:.2f} ms",
            )
        # Sent once more after the trials: the IDs of the measured exchanges are dropped.
        return send_packed() if self.packs else send_plain(), counts

    def _pack(self, ids: Tensor, sent: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
        """Return the packed runs, uint8, node by node, and the number of bytes for every node."""
        runs = [n for lengths in sent for n in lengths]
        packed, sizes = operators.pack_ids(ids, runs)
        # Byte position of every run in the message. Messages are cut between the runs of different nodes.
        ends = [0, *sizes.cumsum(0).tolist()]
        bounds = [ends[first] for first in accumulate(self._num_bands, initial=0)]
        return packed, [end - start for start, end in pairwise(bounds)]

    def _exchange_sizes(
        self, sent: Sequence[Sequence[int]], byte_counts: Sequence[int], device: torch.device
    ) -> tuple[list[list[int]], list[int]]:
        """Exchange the sizes which the ranks need to receive IDs. Collective.

        Args:
            sent: IDs in every run to send, by node.

        Returns:
            Number of IDs in every run to receive, by node, and the number of bytes in the packed message from
            every node. The second list is empty if IDs are not packed.
        """
        # One more number per node: the bytes in its packed message.
        extra = len(byte_counts) > 0
        messages = [[*lengths, *byte_counts[m : m + 1]] for m, lengths in enumerate(sent)]
        message = torch.tensor([n for lengths in messages for n in lengths], dtype=torch.int64, device=device)
        size = self._num_bands[self._node.rank] + extra
        splits = Splits([n + extra for n in self._num_bands], [size] * self._node.size)
        flat = all_to_all(message, splits, self._node, "sizes of ids between nodes").wait().tolist()
        rows = [flat[m * size : (m + 1) * size] for m in range(self._node.size)]
        return [row[: size - extra] for row in rows], [n for row in rows for n in row[size - extra :]]

    def _choose(self, packs: bool, why: str) -> None:
        """Set ``packs`` for the rest of the run, and log the reason on rank 0."""
        self.packs = packs
        if dist.is_initialized() and dist.get_rank() == 0:
            _logger.info("IDs between nodes travel %s: %s.", "packed" if packs else "as they are", why)


def is_faster(plain: float, packed: float) -> bool:
    """Return whether sending packed IDs takes less time than sending plain IDs."""
    return packed < plain


def _median(send: Callable[[], Tensor]) -> float:
    """Call ``send`` three times, and return the median seconds."""
    seconds = []
    for _ in range(_TRIALS):
        began = time.perf_counter()
        send()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
