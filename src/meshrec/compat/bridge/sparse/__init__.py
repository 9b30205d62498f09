"""TorchRec's three sparse types: MeshRec's types in a form that TorchScript compiles and torch.fx traces.

TorchScript compiles the methods in a class body, but not inherited methods. So the methods in these class
bodies stay within TorchScript's subset, and methods inherited from MeshRec's types work in Python only.
"""

from meshrec.compat.bridge.sparse import pytrees  # noqa: F401  registers the types
from meshrec.compat.bridge.sparse.jagged import JaggedTensor
from meshrec.compat.bridge.sparse.keyed import KeyedTensor
from meshrec.compat.bridge.sparse.keyed_jagged import KeyedJaggedTensor

__all__ = ["JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]
