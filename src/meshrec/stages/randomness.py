"""Random values independent of the order in which stages run: every split has a generator.

Stages run at the same time, so they would draw from torch's global generator in any order. Instead, a
generator state is passed with every split from stage to stage. The split's random values equal those in the
unstaged model on the split's samples after ``torch.manual_seed(seed)``.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class SplitRandomness(TorchDispatchMode):
    """Makes random operations draw from ``generator``.

    Attributes:
        drew: whether any operation has drawn random values.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator
        # Set at the first random operation. Staged models without any skip the generators after the first
        # batch.
        self.drew = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags and not _has_no_dropout(func, args, kwargs):
            self.drew = True
            if func is torch.ops.aten.native_dropout.default:
                return _dropout(*args, **kwargs, generator=self._generator)
            if not any(argument.name == "generator" for argument in func._schema.arguments):
                func, kwargs = _with_generator(func), kwargs
            if kwargs.get("generator") is None:
                kwargs["generator"] = self._generator
        return func(*args, **kwargs)


def _has_no_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call draws nothing: attention with dropout 0."""
    names = [argument.name for argument in func._schema.arguments]
    return (
        "dropout_p" in names
        and ({**dict(zip(names, args, strict=False)), **kwargs}).get("dropout_p", 0.0) == 0.0
    )


def _dropout(x: Tensor, p: float, train: bool | None, *, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Compute ``aten::native_dropout``, the fused GPU dropout, which does not accept a generator."""
    mask = torch.ones_like(x, dtype=torch.bool)
    if train is False:
        return x.clone(), mask
    mask.bernoulli_(1 - p, generator=generator)
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


def _with_generator(func: Any) -> Any:
    """Return the ``func`` overload with a generator argument.

    Raises:
        RuntimeError: the overload does not exist.
    """
    packet = func.overloadpacket
    name = "generator" if func._overloadname == "default" else f"{func._overloadname}_generator"
    if name in packet.overloads():
        return getattr(packet, name)
    raise RuntimeError(
        f"{func} draws random numbers but does not accept a generator, so results would depend on which "
        "stage runs first. Use nn.Dropout or torch.rand-like functions, or use a single split "
        "(split_size = batch size)."
    )
