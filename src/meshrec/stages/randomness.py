"""Random values, such as dropout masks, that do not depend on the order in which stages run.

Stages run at the same time, so they would draw from torch's global generator in an arbitrary order. Instead,
every split (microbatch) has a generator, and each stage passes the generator's state to the next stage
together with the split. A split gets the same random values as in the unstaged model, if the unstaged model
runs on the samples of this split after ``torch.manual_seed``. The seed is `split_seed`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class SplitRandomness(TorchDispatchMode):
    """Context in which all random operations draw from ``generator`` instead of torch's global generator.

    Attributes:
        drew: whether an operation has drawn random values in this context.
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
        """Call the ATen operation ``func``, with ``generator`` if the operation draws random values."""
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags and not _has_no_dropout(func, args, kwargs):
            self.drew = True
            if func is torch.ops.aten.native_dropout.default:
                return _dropout(*args, **kwargs, generator=self._generator)
            # Most random operations have another overload that accepts a generator.
            if not any(argument.name == "generator" for argument in func._schema.arguments):
                func, kwargs = _with_generator(func), kwargs
            if kwargs.get("generator") is None:
                kwargs["generator"] = self._generator
        return func(*args, **kwargs)


def _has_no_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the call draws no random values because it is an attention operation with dropout 0."""
    names = [argument.name for argument in func._schema.arguments]
    return (
        "dropout_p" in names
        and ({**dict(zip(names, args, strict=False)), **kwargs}).get("dropout_p", 0.0) == 0.0
    )


def _dropout(x: Tensor, p: float, train: bool | None, *, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Compute dropout as ``aten::native_dropout`` does, but with a generator.

    The fused operation, which torch uses for dropout on GPUs, does not accept a generator.

    Returns:
        The result, and the mask (bool, True for values that are kept), both in the shape of ``x``.
    """
    mask = torch.ones_like(x, dtype=torch.bool)
    if train is False:
        return x.clone(), mask
    mask.bernoulli_(1 - p, generator=generator)
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


def _with_generator(func: Any) -> Any:
    """Return the overload with a ``generator`` argument of the ATen operation ``func``."""
    packet = func.overloadpacket
    # The names are torch's convention, such as ``rand.generator`` and ``randint.low_generator``.
    name = "generator" if func._overloadname == "default" else f"{func._overloadname}_generator"
    if name in packet.overloads():
        return getattr(packet, name)
    raise RuntimeError(
        f"{func} draws random numbers but does not accept a generator, so results would depend on which "
        "stage runs first. Use nn.Dropout or torch.rand-like functions, or use a single split "
        "(split_size = batch size)."
    )
