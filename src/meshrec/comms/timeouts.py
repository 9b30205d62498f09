"""Timeout of collectives."""

from datetime import timedelta

import torch.distributed as dist

from meshrec.comms import host_link


def set_timeout(seconds: float) -> None:
    """Set how long this process's collectives wait for a rank before they fail.

    Applies to all existing process groups, and to host links.

    Args:
        seconds: above 0.
    """
    # Before torch 2.14, only the private name exists.
    set_group_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in list(dist.distributed_c10d._world.pg_map):
        set_group_timeout(timedelta(seconds=seconds), group)
    for link in host_link.open_links():
        link.timeout_seconds = seconds
