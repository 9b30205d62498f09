"""Call a model with other weights than the model's own, without copying the model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

from torch import Tensor, nn


def call_with(model: nn.Module, weights: Mapping[str, Tensor], *arguments: Any) -> Any:
    """Call a model with other parameters and buffers, and return the model's outputs.

    The model has its own weights again afterwards. It must not be called from another thread meanwhile.

    Args:
        model: the model.
        weights: replacements by parameter or buffer name. If modules share a parameter, all of them use the
            replacement. Weights without a replacement stay.
        arguments: positional arguments for the model.
    """
    # Not torch.func.functional_call, which sets attributes and so fails for a table named ``items``: the
    # module with the tables has a method with this name.
    with _replace_weights(model, weights):
        return model(*arguments)


@contextmanager
def _replace_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace parameters and buffers in the model's modules, and restore the originals on exit."""
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    # By identity, because a shared parameter may be replaced under any of its names.
    replacements = {id(original): weights[name] for name, original in named if name in weights}
    # What to restore: the dict of the module, the name in it, and the original value.
    swapped: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in model.modules():
            for original in cast(list[dict[str, Any]], [module._parameters, module._buffers]):
                for name, value in original.items():
                    if id(value) in replacements:
                        swapped.append((original, name, value))
                        original[name] = replacements[id(value)]
        yield
    finally:
        for original, name, value in swapped:
            original[name] = value
