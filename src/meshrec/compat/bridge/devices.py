"""TorchRec's functions that bring modules to a device."""

import copy

import torch
from torch import Tensor, nn


def copy_to_device(module: nn.Module, current_device: torch.device, to_device: torch.device) -> nn.Module:
    """Return a copy of a module, with the tensors of ``current_device`` on ``to_device``."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(to_device) if tensor.device == current_device else tensor

    copied = copy.deepcopy(module)
    copied._apply(moved)
    return copied


def init_parameters(module: nn.Module, device: torch.device) -> None:
    """Bring a module to a device, and draw its parameters anew if that moves any of them."""
    if all(parameter.device == device for parameter in module.parameters()):
        return
    with torch.no_grad():
        is_meta = any(parameter.is_meta for parameter in module.parameters())
        module.to_empty(device=device) if is_meta else module.to(device)
        for each in module.modules():
            reset = getattr(each, "reset_parameters", None)
            if reset is not None:
                reset()
