"""Post-training quantization: tables at 1/4 to 1/16 of their size, for inference."""

from meshrec.ops.nbit import from_fbgemm_bytes, to_fbgemm_bytes
from meshrec.quant.budget import Choice, Rise, choose_precision
from meshrec.quant.from_checkpoint import quantised_about, quantize_checkpoint
from meshrec.quant.precision import Rounding
from meshrec.quant.quantize import quantize, table_bytes

__all__ = [
    "Choice",
    "Rise",
    "Rounding",
    "choose_precision",
    "from_fbgemm_bytes",
    "quantised_about",
    "quantize",
    "quantize_checkpoint",
    "table_bytes",
    "to_fbgemm_bytes",
]
