"""Memory for tables."""

import torch
from torch import Tensor

import meshrec.ops.library  # noqa: F401 - the op must exist before it is implemented

# Alive as long as the op: huge pages are an advice to the system; where no kernel gives it nothing is lost.
_registration = torch.library.Library("meshrec", "IMPL")
_registration.impl("use_huge_pages", lambda memory: None, "CompositeExplicitAutograd")
_registration.impl("use_huge_pages", lambda memory: None, "Meta")


def use_huge_pages(memory: Tensor) -> None:
    """Asks the system to back a new, untouched CPU tensor with huge pages: random rows miss the TLB less.

    An advice: systems that do not know it, and small tensors, are left as they are.
    """
    if memory.device.type == "cpu":
        torch.ops.meshrec.use_huge_pages(memory)
