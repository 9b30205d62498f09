"""Shut down process groups such that their threads end before the Python interpreter does.

gloo's threads end with the last reference to the group, not with ``destroy_process_group``. At exit such a
thread may still hold the last work item, such as a DDP communication hook's callback. Freeing it requires the
interpreter, which is shutting down, so the process aborts: "terminate called without an active exception"
(pytorch issues 38228 and 190489). Three things keep a group alive: function default arguments, DTensor's
caches, and reference cycles such as a sharded model.

``import meshrec`` imports this module, so that programs calling ``destroy_process_group`` exit cleanly as
well.
"""

import atexit
import functools
import gc
import sys
from types import FunctionType

import torch
import torch.distributed as dist


def leave_process_group() -> None:
    """Destroy all process groups, and make sure that their threads end before the interpreter shuts down.

    Call it as the last action of a rank, instead of ``torch.distributed.destroy_process_group``. Local
    variables may still refer to models, which are freed at exit.
    """
    dist.destroy_process_group()
    atexit.unregister(_drop_group_references)
    atexit.register(_drop_group_references)  # atexit runs in reverse order: move this first


def _drop_group_references() -> None:
    """Drop torch's references to process groups, and collect garbage, so that the groups end."""
    # DDP imports this module, whose functions then hold the default group as a default argument.
    functions = vars(sys.modules.get("torch.distributed.nn.functional", object)).values()
    for function in list(functions):
        if isinstance(function, FunctionType):
            function.__defaults__ = None
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _redistribute

        # Private API: torch has no public way to clear these caches, which FSDP2 parameters fill. Not through
        # `torch.distributed.tensor.debug`, which imports Dynamo, a second at the end of each process.
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()
        getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()
        # The Python cache of sharding propagation, and, since 2.14, other caches that keep meshes.
        for cache in [x for x in gc.get_objects() if type(x) is functools._lru_cache_wrapper]:
            if str(cache.__module__).startswith("torch.distributed."):
                cache.cache_clear()
    # Reference cycles, such as in a sharded model, also keep groups alive.
    gc.collect()


atexit.register(_drop_group_references)
