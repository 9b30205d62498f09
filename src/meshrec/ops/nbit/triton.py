"""Lookups in quantized tables on GPUs, with the kernel from ``ops.tbe.triton``.

Quantization and dequantization have no Triton kernel: on GPUs the plain torch versions run.
"""

import importlib.util
from typing import Any

from torch import Tensor

from meshrec.ops.library import implement
from meshrec.ops.nbit import naive
from meshrec.ops.tbe import Lookups, triton


def nbit_forward(weights: list[Tensor], bits: list[int], *arguments: Any) -> Tensor:
    """Look up and pool quantized rows on a GPU, as ``naive.nbit_forward`` does."""
    lookups, (out_size, out_dtype, check_ids, _) = Lookups.split(arguments)
    # The kernel computes row addresses from dims and bits, so wrong widths would read outside the table.
    naive.check_tables(weights, bits, lookups)
    out = triton.look_up(weights, bits, lookups, out_size=out_size, out_dtype=out_dtype, check_ids=check_ids)
    # The plain version raises the error with table, feature and sample.
    return naive.nbit_forward(weights, bits, *arguments) if out is None else out


OPS = [nbit_forward]
"""Operators with Triton kernels."""

if importlib.util.find_spec("triton") is not None:
    implement(OPS, "CUDA")
