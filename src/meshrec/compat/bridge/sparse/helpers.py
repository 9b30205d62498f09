"""TorchRec's helpers for sparse types: conversions and comparisons."""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from meshrec.compat.bridge.sparse.jagged import JaggedTensor
from meshrec.compat.bridge.sparse.keyed_jagged import KeyedJaggedTensor

torch.fx.wrap("jt_is_equal")
torch.fx.wrap("kjt_is_equal")
torch.fx.wrap("maybe_td_to_kjt")


def safe_tolist(tensor: Tensor) -> list[int]:
    """Return the values as a list."""
    values: list[int] = tensor.tolist()
    return values


class ComputeKJTToJTDict(nn.Module):
    """``KeyedJaggedTensor.to_dict`` as a module."""

    def forward(self, keyed_jagged_tensor: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the bags by key."""
        return keyed_jagged_tensor.to_dict()


class ComputeJTDictToKJT(nn.Module):
    """``KeyedJaggedTensor.from_jt_dict`` as a module."""

    def forward(self, jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """Concatenate JaggedTensors to a KeyedJaggedTensor."""
        return KeyedJaggedTensor.from_jt_dict(jt_dict)


def maybe_td_to_kjt(features: KeyedJaggedTensor, keys: list[str] | None = None) -> KeyedJaggedTensor:
    """Convert a TensorDict with jagged nested tensors to a KeyedJaggedTensor. Return other objects unchanged.

    Args:
        features: TensorDict or KeyedJaggedTensor.
        keys: TensorDict entries to use, in order; None: all.
    """
    if not torch.jit.is_scripting():
        # Not imported here: an input can only be a TensorDict if the program has imported the package.
        package = sys.modules.get("tensordict")
        if package is not None and isinstance(features, package.TensorDict):
            names = list(features.keys()) if keys is None else keys
            bags = [features[name] for name in names]
            return KeyedJaggedTensor(
                names,
                torch.cat([bag._values for bag in bags]),
                lengths=torch.cat(
                    [bag.offsets().diff() if bag._lengths is None else bag._lengths for bag in bags]
                ),
            )
    return features


def jt_is_equal(jt_1: Any, jt_2: Any) -> bool:
    """Return whether both are JaggedTensors with the same bags, values and weights, up to rounding."""
    if not isinstance(jt_1, JaggedTensor) or not isinstance(jt_2, JaggedTensor):
        return False
    return all(map(_is_close, _parts(jt_1), _parts(jt_2)))


def kjt_is_equal(kjt_1: Any, kjt_2: Any) -> bool:
    """Return whether both are KeyedJaggedTensors with equal keys, order and bags, up to rounding."""
    if not isinstance(kjt_1, KeyedJaggedTensor) or not isinstance(kjt_2, KeyedJaggedTensor):
        return False
    if kjt_1.keys() != kjt_2.keys() or not all(map(_is_close, _parts(kjt_1), _parts(kjt_2))):
        return False
    same_counts = kjt_1.length_per_key() == kjt_2.length_per_key()
    return (
        same_counts and kjt_1.offset_per_key() == kjt_2.offset_per_key() and kjt_1.stride() == kjt_2.stride()
    )


def _parts(bags: JaggedTensor | KeyedJaggedTensor) -> list[Tensor | None]:
    """Return all tensors of jagged bags; some may be None."""
    return [bags.values(), bags.weights_or_none(), bags.lengths(), bags.offsets()]


def _is_close(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.size() == other.size() and torch.allclose(one, other.to(one.dtype))
