"""The ops before and after the all-to-alls of sharded tables."""

from meshrec.ops.dist import fakes, naive, triton, wire_naive, wire_triton

__all__ = ["fakes", "naive", "triton", "wire_naive", "wire_triton"]
