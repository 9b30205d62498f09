"""Dense layers in bf16: weights of linear layers, and their products."""

import torch
from torch import Tensor, nn


class BFloat16Linear(nn.Linear):
    """Linear layer with bf16 weights and products. Outputs have the input's type."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.to(torch.bfloat16)).to(input.dtype)


def in_bfloat16(model: nn.Module) -> None:
    """Replace every ``nn.Linear`` below ``model`` by a ``BFloat16Linear``, in place."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                # On meta, because the weights are replaced below and initializing them would draw random
                # numbers.
                replacement = BFloat16Linear(child.in_features, child.out_features, device="meta")
                replacement._parameters.update(
                    {
                        parameter_name: None if p is None else nn.Parameter(p.detach().to(torch.bfloat16))
                        for parameter_name, p in child._parameters.items()
                    }
                )
                setattr(module, name, replacement)
