"""Block modules that mix old and new values after a failed load.

A load verifies the whole source before it writes to a table. It can then only fail because of the system: a
full disk, an unreadable disk, or a source changed by another program. To undo the writes, a load would need
a second copy of every table. Instead, the modules raise in forward passes and saves until a load succeeds.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from meshrec.checkpoint.agreement import CheckpointError


class _PartlyLoadedHook:
    """Forward pre-hook of a partly loaded module, which raises. Copied and pickled with the module."""

    def __init__(self, reason: str, source: str) -> None:
        self.reason, self.source = reason, source

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        raise CheckpointError(self.reason)


@contextmanager
def filling(items: Iterable[object], source: object, *, is_whole: bool = True) -> Iterator[None]:
    """Enclose writes to modules. After an error, the modules are blocked: their forward pass raises.

    If the writes succeed, blocks of earlier failures are removed: all of them if ``is_whole``, else only
    blocks of the same source.

    Args:
        items: modules to write to; other objects are ignored.
        source: loaded path.
        is_whole: whether all module values are written.
    """
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
            module.register_forward_pre_hook(_PartlyLoadedHook(reason, str(source)))
        raise
    for module in modules:
        _release(module, None if is_whole else str(source))


def check_finished(item: nn.Module) -> None:
    """Raise CheckpointError if a module is blocked because it is partly loaded."""
    for part in item.modules():
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, _PartlyLoadedHook):
                raise CheckpointError(hook.reason)


def _release(module: nn.Module, source: str | None) -> None:
    """Remove the hooks of failed loads of ``source``; None: of any source."""
    hooks = module._forward_pre_hooks
    for key, hook in list(hooks.items()):
        if isinstance(hook, _PartlyLoadedHook) and source in (None, hook.source):
            del hooks[key]
