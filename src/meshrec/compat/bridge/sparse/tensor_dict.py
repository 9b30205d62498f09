"""The conversion of TensorDicts to KeyedJaggedTensors. The package tensordict is needed only by users of
TensorDicts.
"""

import sys

import torch

from meshrec.compat.bridge.sparse.keyed_jagged import KeyedJaggedTensor

torch.fx.wrap("maybe_td_to_kjt")


def maybe_td_to_kjt(features: KeyedJaggedTensor, keys: list[str] | None = None) -> KeyedJaggedTensor:
    """Convert a TensorDict of jagged nested tensors to a KeyedJaggedTensor. Other objects are returned as
    they are.

    Args:
        features: a TensorDict or a KeyedJaggedTensor.
        keys: the entries of the TensorDict to use, in this order; None: all.
    """
    if not torch.jit.is_scripting():
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
