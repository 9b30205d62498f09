"""The end of a process group: no thread of its backend may outlive the interpreter.

gloo's threads end with the last reference to their group, not with ``destroy_process_group``. At exit such a
thread may still hold what it worked on last, say the callback of a DDP communication hook. To free it the
thread needs the interpreter, which is ending, so the process aborts: "terminate called without an active
exception" (pytorch issues 38228 and 190489). Three things keep a group: default arguments of
functions, DTensor's caches, and reference cycles such as a sharded model.
"""

import atexit
import gc
import sys

import torch.distributed as dist

# Its functions' defaults are the default group of the time of its import, which DDP would do under the group.
import torch.distributed.nn.functional  # noqa: F401


def leave_process_group() -> None:
    """Destroy all process groups, and make their threads end before the interpreter does.

    Call it in place of ``torch.distributed.destroy_process_group``, as the last action of a rank. Local
    variables of functions may still hold models; these are freed at exit. ``meshrec.distributed`` must be
    imported before the groups are made.
    """
    dist.destroy_process_group()
    atexit.register(_let_go)


def _let_go() -> None:
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        # Private: torch has no other word for these caches, which FSDP2's parameters fill.
        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()
    gc.collect()
