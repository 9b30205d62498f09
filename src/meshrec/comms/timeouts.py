"""The time that ranks wait for each other."""

from datetime import timedelta

import torch.distributed as dist

from meshrec.comms import host_link


def set_timeout(seconds: float) -> None:
    """Set how long collectives of this process wait for a rank before they fail.

    The time holds for all present process groups, and for the links between the ranks of one host.

    Args:
        seconds: above 0.
    """
    # Private: torch has no other word for it, but a new group for each timeout.
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
    for link in host_link.open_links():
        link.timeout_seconds = seconds
