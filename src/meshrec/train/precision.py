"""Choose the precision of a model's dense part, and compare the loss in bf16 and fp32.

The dense part is everything but the embedding tables.
"""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from meshrec.train.evaluation import concat_weights, padded_logits
from meshrec.train.losses import Loss
from meshrec.train.ranks import Ranks
from meshrec.train.recipe import Precision

if TYPE_CHECKING:
    from meshrec.data import Batch, Reader

# Batches per rank, and samples per batch, on which `check_loss` compares both precisions.
_CHECKED_BATCHES = 4
_CHECKED_BATCH = 1024
_CPU_FLAGS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "bf16": "Arm BF16"}
"""CPU flags in /proc/cpuinfo for bf16 matrix products, and the names of the instructions."""


class DensePrecision(NamedTuple):
    """Precision of the dense part in a run.

    Attributes:
        bf16: True for bf16, False for fp32.
        reason: message for the user; None if the recipe sets fp32.
    """

    bf16: bool
    reason: str | None


def choose_precision(setting: Precision, ranks: Ranks) -> DensePrecision:
    """Return the dense precision, the same on all ranks, and the reason to log.

    Collective for ``auto`` and ``bf16``.

    Args:
        setting: the recipe's ``training.dense_precision``. ``auto`` chooses bf16 if the devices of all ranks
            have instructions for bf16 products, otherwise fp32. ``bf16`` always chooses bf16, and the reason
            says if it may be slower than fp32.
        ranks: the ranks, from `join`.
    """
    if setting == "fp32":
        return DensePrecision(False, None)
    units = ranks.collect(native_bf16(ranks.device))
    # The result must be the same on all ranks.
    lacking = [rank for rank, unit in enumerate(units) if unit is None]
    kind = "GPU" if ranks.device.type == "cuda" else "CPU"
    if not lacking:
        return DensePrecision(True, f"dense part in bf16: the {kind} has native bf16 products ({units[0]})")
    whose = f"the {kind} of rank {lacking[0]} has no native bf16 products"
    if setting == "auto":
        return DensePrecision(False, f"dense part in fp32: {whose}")
    return DensePrecision(True, f"dense part in bf16, which may be slower than fp32: {whose}")


def native_bf16(device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Return the name of a device's instructions for bf16 matrix products, or None if it has none.

    Args:
        device: a CPU or a GPU.
        cpuinfo: CPU description file; if it does not exist, as outside Linux, the result is None.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        # bf16 matrix products need Ampere (sm_80) or later.
        return f"sm_{major}{minor}" if major >= 8 else None
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return None
    flags = {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split()}
    return next((name for flag, name in _CPU_FLAGS.items() if flag in flags), None)


class LossCheck(NamedTuple):
    """Loss in both precisions, for the same weights and samples.

    Attributes:
        samples: number of samples over all ranks.
        bf16: loss with the dense part in bf16.
        fp32: loss with the dense part in fp32.
    """

    samples: int
    bf16: float
    fp32: float

    @property
    def difference(self) -> float:
        """Loss in bf16 minus loss in fp32."""
        return self.bf16 - self.fp32


def check_loss(model: nn.Module, reader: "Reader", ranks: Ranks, loss: Loss) -> LossCheck | None:
    """Compute a model's loss on a few batches, in bf16 and in fp32. Collective.

    The model is in training mode afterwards.

    Args:
        model: a model called as ``model(dense, sparse)``.
        reader: the samples, which are divided among the ranks.
        ranks: the ranks, from `join`.
        loss: the recipe's loss, which computes metrics from outputs and labels.

    Returns:
        Both losses, or None if the loss is not among the metrics.
    """
    # Without dropout, which would give both precisions different losses.
    model.eval()
    try:
        batches = list(
            islice(reader.batches(_CHECKED_BATCH, rank=ranks.rank, world_size=ranks.size), _CHECKED_BATCHES)
        )
        # In this order, `values` is (bf16, fp32).
        values = [_compute_loss(model, batches, ranks, loss, bf16=bf16) for bf16 in (True, False)]
    finally:
        model.train()
    (samples,) = ranks.sum([sum(len(batch) for batch in batches)])
    rounded, exact = values
    return None if rounded is None or exact is None else LossCheck(int(samples), rounded, exact)


def _compute_loss(
    model: nn.Module, batches: "Sequence[Batch]", ranks: Ranks, loss: Loss, *, bf16: bool
) -> float | None:
    """Return the loss over the batches on all ranks, or None if it is not among the metrics. Collective."""
    logits = torch.cat([padded_logits(model, batch, _CHECKED_BATCH, ranks, bf16=bf16) for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])
    weights = concat_weights([(batch.weights, len(batch.labels)) for batch in batches])
    return loss.metrics(logits, labels, weights, group=ranks.control).get("loss")
