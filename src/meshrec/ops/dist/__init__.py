"""Operators before and after the all-to-alls of sharded tables."""

from meshrec.ops.dist import average_naive, fakes, ids_naive, naive, triton, wire_naive, wire_triton

__all__ = ["average_naive", "fakes", "ids_naive", "naive", "triton", "wire_naive", "wire_triton"]
