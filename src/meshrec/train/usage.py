"""Memory, CPU time and gradient norm for a training metrics line."""

import resource
import time
from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def memory_and_cpu() -> tuple[float, float]:
    """Return this process's peak memory in MiB and CPU seconds, both since process start."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, time.process_time()


def gradient_norm(parameters: Iterable[Tensor]) -> float:
    """Return the last step's gradient norm, after clipping."""
    norm = nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
