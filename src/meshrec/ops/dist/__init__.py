"""Operators around the all-to-alls of sharded tables: route IDs to ranks, and gather and scatter rows."""

from meshrec.ops.dist import average_naive, fakes, ids_naive, naive, triton, wire_naive, wire_triton

__all__ = ["average_naive", "fakes", "ids_naive", "naive", "triton", "wire_naive", "wire_triton"]
