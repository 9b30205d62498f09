"""Block modules in which a failed load mixed old and new values.

A load verifies the whole source before writing to a table. Later failures are system failures: a full disk,
an unreadable disk, or a source changed by another program. Undoing the writes would need a second copy of
every table. Instead, the modules refuse to run and to be saved until a load succeeds.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from meshrec.checkpoint.agreement import CheckpointError


class _Refusal:
    """Forward pre-hook on a partly loaded module; copied and pickled with the module."""

    def __init__(self, reason: str, source: str) -> None:
        self.reason, self.source = reason, source

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        raise CheckpointError(self.reason)


@contextmanager
def filling(items: Iterable[object], source: object, *, is_whole: bool = True) -> Iterator[None]:
    """Write to modules; if that fails, block them.

    Success unblocks them, except from a failed load of another source if ``is_whole`` is False.

    Args:
        items: modules written to; other objects are ignored.
        source: path being loaded.
        is_whole: whether every value of the modules is written.
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
            module.register_forward_pre_hook(_Refusal(reason, str(source)))
        raise
    for module in modules:
        _release(module, None if is_whole else str(source))


def check_finished(item: nn.Module) -> None:
    """Check that a module is not partly loaded.

    Raises:
        CheckpointError: it is partly loaded.
    """
    for part in item.modules():
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, _Refusal):
                raise CheckpointError(hook.reason)


def _release(module: nn.Module, source: str | None) -> None:
    """Remove refusals from failed loads of ``source``; None: any source."""
    hooks = module._forward_pre_hooks
    for key, hook in list(hooks.items()):
        if isinstance(hook, _Refusal) and source in (None, hook.source):
            del hooks[key]
