"""The operators: their schemas, plain torch versions, Triton kernels, gradients and fakes. C++ kernels are in
csrc.
"""
