"""Operators: schemas, plain torch references, Triton kernels, gradients and fake kernels.

The C++ kernels are in csrc/.
"""
