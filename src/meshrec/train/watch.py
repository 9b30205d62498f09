"""Search for the first module whose output is NaN or infinite."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# Prefixes that wrappers of a model add to the names of its modules.
_WRAPPERS = ("_dmp_wrapped_module.", "module.")


class LossError(ValueError):
    """The loss is NaN or infinite, and the run cannot continue."""


class OutputWatch:
    """The outputs of a step's modules, kept until the next step and inspected only if the loss is not finite.

    Autograd keeps most of them anyway, so this costs a call per module and little memory.

    Args:
        model: the model to watch while it is in training mode.
    """

    def __init__(self, model: nn.Module) -> None:
        self._seen: list[tuple[str, Any]] = []
        for name, module in model.named_modules():
            for wrapper in _WRAPPERS:
                name = name.removeprefix(wrapper)
            if name and name not in ("_dmp_wrapped_module", "module"):
                module.register_forward_hook(partial(self._take, name))

    def forget(self) -> None:
        """Drop the outputs."""
        self._seen.clear()

    def first_bad(self) -> str | None:
        """Return the first module, in the order in which they finished, whose output has NaN or infinity."""
        for name, output in self._seen:
            if any(not bool(torch.isfinite(each).all()) for each in _tensors(output)):
                return name
        return None

    def _take(self, name: str, module: nn.Module, _: Any, output: Any) -> None:
        if module.training:
            self._seen.append((name, output))


def _tensors(output: Any) -> Iterator[Tensor]:
    """Find the floating-point tensors in a module's output: alone, in containers, or as keyed embeddings."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output.detach()
    elif isinstance(output, dict):
        yield from _tensors(list(output.values()))
    elif isinstance(output, list | tuple):
        for each in output:
            yield from _tensors(each)
    elif callable(getattr(output, "values", None)):
        yield from _tensors(output.values())
