"""Search for the first module with NaN or infinity in the output."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# Prefixes that model wrappers add to module names.
_WRAPPERS = ("_dmp_wrapped_module.", "module.")


class LossError(ValueError):
    """The loss is NaN or infinite, and the run cannot continue."""


class FiniteFlag:
    """Whether a loss is finite, computed on the device without waiting for it; only ``read`` waits.

    Args:
        loss: a scalar.
    """

    def __init__(self, loss: Tensor) -> None:
        self._flag = loss.detach().isfinite()
        self._copied: torch.cuda.Event | None = None
        if loss.is_cuda:
            # A copy to unpinned memory would wait for the device.
            pinned = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._flag = pinned.copy_(self._flag, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> bool:
        """Wait for the flag, but not for work queued after it, and return it."""
        if self._copied is not None:
            self._copied.synchronize()
        return bool(self._flag)


class OutputWatch:
    """Keeps references to all module outputs of a step, to search them if the loss is not finite.

    Autograd keeps most outputs anyway, so this costs a call per module and little memory.

    Args:
        model: the model to watch while it is in training mode.
    """

    def __init__(self, model: nn.Module) -> None:
        # Outputs of the current step in forward order; `forget` clears them.
        self._seen: list[tuple[str, Any]] = []
        for name, module in model.named_modules():
            for wrapper in _WRAPPERS:
                name = name.removeprefix(wrapper)
            # A Sequential returns what its last module did.
            if name and name not in ("_dmp_wrapped_module", "module") and type(module) is not nn.Sequential:
                module.register_forward_hook(partial(self._record, name))

    def forget(self) -> None:
        """Drop the outputs."""
        self._seen.clear()

    def first_nonfinite(self) -> str | None:
        """Return the first module to finish with NaN or infinity in the output."""
        for name, output in self._seen:
            if any(not bool(torch.isfinite(tensor).all()) for tensor in _float_tensors(output)):
                return name
        return None

    def _record(self, name: str, module: nn.Module, _: Any, output: Any) -> None:
        """Forward hook: keep a module's output in training mode."""
        if module.training:
            self._seen.append((name, output))


def _float_tensors(output: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in a module output: alone, in containers, or as keyed embeddings."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output.detach()
    elif isinstance(output, dict):
        yield from _float_tensors(list(output.values()))
    elif isinstance(output, list | tuple):
        for item in output:
            yield from _float_tensors(item)
    elif callable(getattr(output, "values", None)):
        yield from _float_tensors(output.values())
