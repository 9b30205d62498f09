"""Call a model with other weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

from torch import Tensor, nn


def call_with(model: nn.Module, weights: Mapping[str, Tensor], *arguments: Any) -> Any:
    """Call a model with replaced parameters and buffers.

    ``torch.func.functional_call`` sets attributes, so it fails for a table named ``items``, a method of the
    module which holds the table.

    Args:
        model: model.
        weights: replacement values by name; modules sharing a parameter all get the value.
        arguments: model arguments.
    """
    with _weights_of(model, weights):
        return model(*arguments)


@contextmanager
def _weights_of(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
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
