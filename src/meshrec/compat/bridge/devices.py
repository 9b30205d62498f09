"""TorchRec's helpers that move modules between devices."""

import copy

import torch
from torch import Tensor, nn


def copy_to_device(module: nn.Module, current_device: torch.device, to_device: torch.device) -> nn.Module:
    """Return a deep copy with tensors moved from ``current_device`` to ``to_device``.

    Args:
        module: module to copy. It is not changed.
        current_device: tensors on other devices are copied where they are.
        to_device: target device.
    """

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(to_device) if tensor.device == current_device else tensor

    copied = copy.deepcopy(module)
    copied._apply(moved)
    return copied


class CopyableMixin(nn.Module):
    """Module with a copy method from the CPU to a device."""

    def copy(self, device: torch.device) -> nn.Module:
        """Return a copy on ``device``."""
        return copy_to_device(self, torch.device("cpu"), device)


def init_parameters(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device. Reinitialize all parameters if any of them was elsewhere."""
    if all(parameter.device == device for parameter in module.parameters()):
        return
    with torch.no_grad():
        is_meta = any(parameter.is_meta for parameter in module.parameters())
        # ``to`` cannot copy out of meta tensors. Their values are drawn below in either case.
        module.to_empty(device=device) if is_meta else module.to(device)
        for each in module.modules():
            reset = getattr(each, "reset_parameters", None)
            if reset is not None:
                reset()
