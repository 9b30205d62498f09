"""Functions that wait for a module's first forward pass. torch's lazy modules take keyword arguments now."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

M = TypeVar("M", bound=nn.Module)

Function = Callable[[nn.Module], object]


def lazy_apply(module: M, fn: Function) -> M:
    """Apply ``fn`` to a module and all modules inside it, once, right after its first forward pass.

    Returns:
        The module.
    """
    waiting: list[Function] | None = getattr(module, "_functions_to_lazy_apply", None)
    if waiting is None:
        waiting = module._functions_to_lazy_apply = []  # type: ignore[assignment]
        module._lazy_apply_hook = module.register_forward_hook(_apply_waiting)  # type: ignore[assignment]
    waiting.append(fn)
    return module


def _apply_waiting(module: nn.Module, args: Any, output: Any) -> None:
    for fn in vars(module).pop("_functions_to_lazy_apply"):
        module.apply(fn)
    vars(module).pop("_lazy_apply_hook").remove()


class LazyModuleExtensionMixin(LazyModuleMixin):
    """torch's LazyModuleMixin with keyword arguments for ``initialize_parameters``.

    ``apply`` before the first forward pass is an error.
    """

    def apply(self, fn: Function) -> Any:
        """Apply ``fn`` to every module inside, and to this one.

        Raises:
            RuntimeError: there was no forward pass yet.
        """
        if hasattr(self, "_initialize_hook"):
            raise RuntimeError(
                f"{type(self).__name__} has not been initialized. Run a forward pass, or use lazy_apply."
            )
        return super().apply(fn)  # type: ignore[misc]
