"""Detect a loss that is NaN or infinite, and find the first module with such an output."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# Prefixes that DistributedModelParallel and DistributedDataParallel add to module names.
_WRAPPERS = ("_dmp_wrapped_module.", "module.")


class LossError(ValueError):
    """Raised if the loss or a metric is NaN or infinite, so that the run cannot continue."""


class FiniteFlag:
    """Flag that says whether a loss is finite. Creating it does not wait for the device; only `read` waits.

    Args:
        loss: the loss, a 0-d tensor.
    """

    def __init__(self, loss: Tensor) -> None:
        self._flag = loss.detach().isfinite()
        # Recorded after the copy to the host; None on a CPU.
        self._copied: torch.cuda.Event | None = None
        if loss.is_cuda:
            # Use pinned memory, because a copy to other memory would wait for the device.
            pinned = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._flag = pinned.copy_(self._flag, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> bool:
        """Wait until the flag is computed, but not for later work on the device, and return the flag."""
        if self._copied is not None:
            self._copied.synchronize()
        return bool(self._flag)


class OutputWatch:
    """Recorder of the outputs of all modules in a forward pass, to search them for NaN and infinity.

    The outputs are searched only if the loss is not finite. Autograd keeps most outputs anyway, so recording
    costs a call per module and little memory.

    Args:
        model: the model. Only forward passes in training mode are recorded.
    """

    def __init__(self, model: nn.Module) -> None:
        # Module name and output, in forward order, since the last `forget`.
        self._seen: list[tuple[str, Any]] = []
        for name, module in model.named_modules():
            for wrapper in _WRAPPERS:
                name = name.removeprefix(wrapper)
            # Skip Sequential modules, because their output is that of their last module.
            if name and name not in ("_dmp_wrapped_module", "module") and type(module) is not nn.Sequential:
                module.register_forward_hook(partial(self._record, name))

    def forget(self) -> None:
        """Drop all recorded outputs."""
        self._seen.clear()

    def first_nonfinite(self) -> str | None:
        """Return the name of the first module with NaN or infinity in the output, or None."""
        for name, output in self._seen:
            if any(not bool(torch.isfinite(tensor).all()) for tensor in _float_tensors(output)):
                return name
        return None

    def _record(self, name: str, module: nn.Module, _: Any, output: Any) -> None:
        """Forward hook that records a module's output if the module is in training mode."""
        if module.training:
            self._seen.append((name, output))


def _float_tensors(output: Any) -> Iterator[Tensor]:
    """Yield all floating-point tensors in a module output.

    The output may be a tensor, a container, or an object with ``values()`` such as a KeyedTensor.
    """
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output.detach()
    elif isinstance(output, dict):
        yield from _float_tensors(list(output.values()))
    elif isinstance(output, list | tuple):
        for item in output:
            yield from _float_tensors(item)
    # KeyedTensor and JaggedTensor, which are no containers, but have a method `values`.
    elif callable(getattr(output, "values", None)):
        yield from _float_tensors(output.values())
