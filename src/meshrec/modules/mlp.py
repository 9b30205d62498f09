"""Multilayer perceptrons. Parameters have TorchRec's names, so that TorchRec checkpoints load."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from meshrec.modules.activation import SwishLayerNorm, relu
from meshrec.modules.linear import Linear
from meshrec.modules.precision import computes_in_bf16

TensorFunction = Callable[[Tensor], Tensor]
Activation = str | nn.Module | TensorFunction | Callable[[], nn.Module]
"""Argument ``activation`` of `MLP`."""

_NAMED: dict[str, TensorFunction] = {"relu": relu, "sigmoid": torch.sigmoid}
_SWISH = "swish_layernorm"


class Perceptron(nn.Module):
    """Linear layer followed by an activation, with parameters in ``_linear``.

    Args:
        in_size: Input columns.
        out_size: Output columns.
        bias: Whether the layer has a bias.
        activation: Tensor function or module.
        device: Parameter device.
        dtype: Parameter dtype.
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
        # torch.relu is the default: use the variant with reused buffers.
        self._activation_fn = relu if activation is torch.relu else activation

    def forward(self, input: Tensor) -> Tensor:
        """Map [B, in_size] to [B, out_size]."""
        # TorchScript compiles this method. It skips this branch, but parses comments after `type:`.
        if not torch.jit.is_scripting():  # type: ignore
            # A subclass or replacement of the layer, as quantization makes, has no fused ReLU.
            fuses = self._activation_fn is relu and type(self._linear) is Linear
            if fuses and torch.is_autocast_enabled("cpu") and computes_in_bf16(input):
                return self._linear(input, relu=True)  # type: ignore[no-any-return]
        return self._activation_fn(self._linear(input))


class MLP(nn.Module):
    """Multilayer perceptron: linear layers, each followed by an activation.

    Parameters are in ``_mlp.<i>._linear``.

    Args:
        in_size: Input columns.
        layer_sizes: Output columns of every layer.
        bias: Whether layers have a bias.
        activation: ``"relu"``, ``"sigmoid"``, ``"swish_layernorm"``, a tensor function, a module shared by
            all layers, or a class or function without arguments that builds a module per layer.
        device: Parameter device.
        dtype: Parameter dtype.
        activation_on_last: Whether to apply the activation after the last layer, too.

    Raises:
        ValueError: The activation name is unknown, or a function without arguments does not return a module.

    Example::

        >>> MLP(8, [16, 4])(torch.ones(2, 8)).shape
        torch.Size([2, 4])
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
            in_columns = layer_sizes[index - 1] if index else in_size
            is_linear = index == len(layer_sizes) - 1 and not activation_on_last
            layer_activation = nn.Identity() if is_linear else _activation(activation, size, device)
            layers.append(Perceptron(in_columns, size, bias, layer_activation, device, dtype))
        self._mlp = nn.Sequential(*layers)

    def forward(self, input: Tensor) -> Tensor:
        """Map [B, in_size] to [B, layer_sizes[-1]]."""
        return self._mlp(input)  # type: ignore[no-any-return]


def _activation(activation: Activation, size: int, device: torch.device | None) -> nn.Module | TensorFunction:
    """Return the activation function for a layer."""
    if isinstance(activation, str):
        if activation == _SWISH:
            return SwishLayerNorm(size, device=device)
        if activation not in _NAMED:
            allowed = sorted([*_NAMED, _SWISH])
            raise ValueError(
                f"activation must be a function, a module or one of {allowed}, got {activation!r}."
            )
        return _NAMED[activation]
    if isinstance(activation, nn.Module) or not _is_factory(activation):
        return cast(Any, activation)  # type: ignore[no-any-return]
    # A class or function without arguments makes a new module for every layer.
    module = cast(Callable[[], object], activation)()
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"an activation without arguments must return a module, got a {type(module).__name__} from "
            f"{activation!r}. Pass a function of a tensor, or one that returns a torch.nn.Module."
        )
    return module


def _is_factory(function: Callable[..., object]) -> bool:
    """Return whether ``function`` can be called without arguments.

    torch's C++ functions have no signature and count as tensor functions.
    """
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True
