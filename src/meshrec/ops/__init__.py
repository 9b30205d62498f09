"""Operators: schemas, plain torch versions, Triton kernels, gradients, and output shapes for tracing.

``schemas.inc`` declares all operators. A ``naive.py`` has the plain torch version, which documents an
operator and is the reference for the kernels. The C++ kernels are in csrc/.
"""
