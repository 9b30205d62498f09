"""Attention over jagged sequences: pointwise SiLU (HSTU) in blocks, see ``naive.py`` for the formula."""

from meshrec.ops.attention.blocks import silu_attention
from meshrec.ops.attention.naive import Bias, Mask, num_buckets_of, time_buckets

__all__ = ["Bias", "Mask", "num_buckets_of", "silu_attention", "time_buckets"]
