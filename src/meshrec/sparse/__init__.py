"""Sparse inputs (jagged tensors) and keyed dense tensors, with TorchRec's names and semantics.

A jagged tensor holds bags: lists of values with different lengths, such as the IDs of a feature per sample.
"""

from meshrec.sparse import pytrees  # noqa: F401  registers the types
from meshrec.sparse.jagged_tensor import JaggedTensor
from meshrec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from meshrec.sparse.keyed_tensor import KeyedTensor

__all__ = ["JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]
