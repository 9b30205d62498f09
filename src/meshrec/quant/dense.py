"""The dense part in bf16: the weights of linear layers, and their products."""

import torch
from torch import Tensor, nn


class BFloat16Linear(nn.Linear):
    """A linear layer with weights and products in bf16. Its output has the type of its input."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.to(torch.bfloat16)).to(input.dtype)


def in_bfloat16(model: nn.Module) -> None:
    """Replace every ``nn.Linear`` below ``model`` by a ``BFloat16Linear``, in place."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                made = BFloat16Linear(child.in_features, child.out_features, device="meta")
                made._parameters.update(
                    {
                        own: None if p is None else nn.Parameter(p.detach().to(torch.bfloat16))
                        for own, p in child._parameters.items()
                    }
                )
                setattr(module, name, made)
