"""TorchRec's three sparse types: MeshRec's types, written so that TorchScript compiles and torch.fx traces
them.

TorchScript compiles every method in a class's own body, and no inherited method. So methods in these bodies
are in TorchScript's language, and methods inherited from MeshRec's types work in Python only.
"""

from meshrec.compat.bridge.sparse import pytrees  # noqa: F401  registers the types
from meshrec.compat.bridge.sparse.jagged import JaggedTensor
from meshrec.compat.bridge.sparse.keyed import KeyedTensor
from meshrec.compat.bridge.sparse.keyed_jagged import KeyedJaggedTensor

__all__ = ["JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]
