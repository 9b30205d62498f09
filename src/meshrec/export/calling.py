"""Calls of a model with other weights than its own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

from torch import Tensor, nn


def call_with(model: nn.Module, weights: Mapping[str, Tensor], *arguments: Any) -> Any:
    """Call a model with other values for its parameters and buffers.

    ``torch.func.functional_call`` does the same by attributes, and so fails for a table called ``items``,
    which is a method of the module that holds it.

    Args:
        model: the model.
        weights: the values by name, which modules that share a parameter take together.
        arguments: the arguments of the model.
    """
    with _weights_of(model, weights):
        return model(*arguments)


@contextmanager
def _weights_of(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    others = {id(own): weights[name] for name, own in named if name in weights}
    swapped: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in model.modules():
            for own in cast(list[dict[str, Any]], [module._parameters, module._buffers]):
                for name, value in own.items():
                    if id(value) in others:
                        swapped.append((own, name, value))
                        own[name] = others[id(value)]
        yield
    finally:
        for own, name, value in swapped:
            own[name] = value
