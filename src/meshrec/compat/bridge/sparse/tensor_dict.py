"""TensorDict to KeyedJaggedTensor conversion. Only TensorDict users need the tensordict package."""

import sys

import torch

from meshrec.compat.bridge.sparse.keyed_jagged import KeyedJaggedTensor

torch.fx.wrap("maybe_td_to_kjt")


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
