"""Stacks of linear layers. Parameters have TorchRec's names, so that its checkpoints load."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from meshrec.modules.activation import SwishLayerNorm, relu
from meshrec.modules.linear import Linear

TensorFunction = Callable[[Tensor], Tensor]
Activation = str | nn.Module | TensorFunction | Callable[[], nn.Module]

_NAMED: dict[str, TensorFunction] = {"relu": relu, "sigmoid": torch.sigmoid}
_SWISH = "swish_layernorm"


class Perceptron(nn.Module):
    """A linear layer and an activation, with parameters at ``_linear``.

    Args:
        in_size, out_size: number of columns of input and output.
        bias: whether the layer has a bias.
        activation: a function of a tensor, or a module.
        device, dtype: device and dtype of the parameters.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        bias: bool = True,
        activation: nn.Module | TensorFunction = torch.relu,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._linear = Linear(in_size, out_size, bias=bias, device=device, dtype=dtype)
        self._activation_fn = relu if activation is torch.relu else activation

    def forward(self, input: Tensor) -> Tensor:
        """Map [B, in_size] to [B, out_size]."""
        return self._activation_fn(self._linear(input))


class MLP(nn.Module):
    """Linear layers, each followed by ``activation``, with parameters at ``_mlp.<i>._linear``.

    Args:
        in_size: number of columns of the input.
        layer_sizes: number of columns of each layer's output.
        bias: whether the layers have a bias.
        activation: ``"relu"``, ``"sigmoid"``, ``"swish_layernorm"``, a function of a tensor, a module that
            all layers share, or a class or function without arguments that makes a module for each layer.
        device, dtype: device and dtype of the parameters.
        activation_on_last: whether the last layer has an activation.

    Raises:
        ValueError: the name of the activation is unknown, or a function without arguments does not return a
            module.
    """

    def __init__(
        self,
        in_size: int,
        layer_sizes: Sequence[int],
        bias: bool = True,
        activation: Activation = torch.relu,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        activation_on_last: bool = True,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for index, size in enumerate(layer_sizes):
            before = layer_sizes[index - 1] if index else in_size
            is_linear = index == len(layer_sizes) - 1 and not activation_on_last
            chosen = nn.Identity() if is_linear else _activation(activation, size, device)
            layers.append(Perceptron(before, size, bias, chosen, device, dtype))
        self._mlp = nn.Sequential(*layers)

    def forward(self, input: Tensor) -> Tensor:
        """Map [B, in_size] to [B, layer_sizes[-1]]."""
        return self._mlp(input)  # type: ignore[no-any-return]


def _activation(activation: Activation, size: int, device: torch.device | None) -> nn.Module | TensorFunction:
    if isinstance(activation, str):
        if activation == _SWISH:
            return SwishLayerNorm(size, device=device)
        if activation not in _NAMED:
            allowed = sorted([*_NAMED, _SWISH])
            raise ValueError(
                f"activation must be a function, a module or one of {allowed}, got {activation!r}."
            )
        return _NAMED[activation]
    if isinstance(activation, nn.Module) or not _takes_nothing(activation):
        return cast(Any, activation)  # type: ignore[no-any-return]
    made = cast(Callable[[], object], activation)()
    if not isinstance(made, nn.Module):
        raise ValueError(
            f"an activation that takes no argument must make a module, got a {type(made).__name__} from "
            f"{activation!r}. Pass a function of a tensor, or one that returns a torch.nn.Module."
        )
    return made


def _takes_nothing(function: Callable[..., object]) -> bool:
    """Return whether ``function`` can be called without arguments.

    Functions of torch's C++ side, whose signature is unknown, count as functions of a tensor.
    """
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True
