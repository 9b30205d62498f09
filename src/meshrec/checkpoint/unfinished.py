"""Prevent the use of modules with a mixture of old and new values, because a load failed halfway.

A load verifies the whole source before it writes to a table. After that it can only fail because of the
system: a full disk, an unreadable disk, or a source changed by another program. To undo the writes, a load
would need a second copy of every table. Instead, a hook makes the modules raise in forward passes and saves
until a load succeeds.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from meshrec.checkpoint.agreement import CheckpointError


class _PartlyLoadedHook:
    """Forward pre-hook that raises, because the module is partly loaded.

    A class instead of a closure, so it can be copied and pickled with the module.
    """

    def __init__(self, reason: str, source: str) -> None:
        self.reason, self.source = reason, source

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        raise CheckpointError(self.reason)


@contextmanager
def filling(items: Iterable[object], source: object, *, is_whole: bool = True) -> Iterator[None]:
    """Context manager for writing loaded values to modules. If writing fails, it makes the modules unusable.

    After an error, the modules raise in forward passes. If the writes succeed, hooks from earlier failed
    loads are removed: all of them if ``is_whole``, else only hooks from loads of the same source.

    Args:
        items: modules to write to. Objects that are not modules are ignored.
        source: path or description of the loaded source.
        is_whole: whether all values of the modules are written.
    """
    # Submodules as well, because they may be called or saved separately.
    modules = [part for item in items if isinstance(item, nn.Module) for part in item.modules()]
    try:
        yield
    except BaseException as error:
        reason = (
            f"the model is partly loaded: loading {source} failed after rows had been replaced ({error}). "
            "Load it again, or load a whole checkpoint, before you use or save the model."
        )
        for module in modules:
            _release(module, str(source))
            # At most one hook per source, however often a load of it fails.
            module.register_forward_pre_hook(_PartlyLoadedHook(reason, str(source)))
        raise
    for module in modules:
        _release(module, None if is_whole else str(source))


def check_finished(item: nn.Module) -> None:
    """Raise CheckpointError if a module, or a submodule, is partly loaded after a failed load."""
    for part in item.modules():
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, _PartlyLoadedHook):
                raise CheckpointError(hook.reason)


def _release(module: nn.Module, source: str | None) -> None:
    """Remove a module's hooks from failed loads of ``source``, or from all failed loads if it is None."""
    hooks = module._forward_pre_hooks
    for key, hook in list(hooks.items()):
        if isinstance(hook, _PartlyLoadedHook) and source in (None, hook.source):
            del hooks[key]
