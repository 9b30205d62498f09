"""Functions that are applied to a module after its first forward pass."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

M = TypeVar("M", bound=nn.Module)

Function = Callable[[nn.Module], object]


def lazy_apply(module: M, fn: Function) -> M:
    """Apply ``fn`` to a module and all submodules once, right after the first forward pass.

    Returns:
        The module.
    """
    # Pending functions. The list and the hook exist from the first lazy_apply to the next forward pass.
    waiting: list[Function] | None = getattr(module, "_functions_to_lazy_apply", None)
    if waiting is None:
        waiting = module._functions_to_lazy_apply = []  # type: ignore[assignment]
        module._lazy_apply_hook = module.register_forward_hook(_apply_waiting)  # type: ignore[assignment]
    waiting.append(fn)
    return module


def _apply_waiting(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook that applies all functions passed to `lazy_apply`, and then removes itself."""
    for fn in vars(module).pop("_functions_to_lazy_apply"):
        module.apply(fn)
    vars(module).pop("_lazy_apply_hook").remove()


class LazyModuleExtensionMixin(LazyModuleMixin):
    """torch's LazyModuleMixin with an ``apply`` which raises an error before the first forward pass.

    TorchRec's mixin also passes keyword arguments to ``initialize_parameters``, which torch now does itself.
    """

    def apply(self, fn: Function) -> Any:
        """Apply ``fn`` to every submodule and to this module.

        Raises:
            RuntimeError: the module has not run a forward pass.
        """
        if hasattr(self, "_initialize_hook"):
            raise RuntimeError(
                f"{type(self).__name__} has not been initialized. Run a forward pass, or use lazy_apply."
            )
        return super().apply(fn)  # type: ignore[misc]
