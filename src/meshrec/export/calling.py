"""Call a model with replaced weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

from torch import Tensor, nn


def call_with(model: nn.Module, weights: Mapping[str, Tensor], *arguments: Any) -> Any:
    """Call a model with other parameters and buffers.

    Args:
        model: the model.
        weights: parameters and buffers by name. Modules sharing a parameter all get the value.
        arguments: model arguments.
    """
    # Not torch.func.functional_call, which sets attributes and so fails for a table named ``items``: the
    # module with the tables has a method with this name.
    with _replace_weights(model, weights):
        return model(*arguments)


@contextmanager
def _replace_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace parameters and buffers, and restore them at the end."""
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    replacements = {id(original): weights[name] for name, original in named if name in weights}
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
