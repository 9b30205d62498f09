"""TorchRec's three sparse types: MeshRec's, so written that TorchScript compiles and torch.fx traces them.

TorchScript compiles every method that stands in a class's own body, and nothing that it inherits. So what
these classes do themselves is in its language, and what they inherit from MeshRec's works in Python only.
"""

from meshrec.compat.bridge.sparse import pytrees  # noqa: F401  registers the types
from meshrec.compat.bridge.sparse.jagged import JaggedTensor
from meshrec.compat.bridge.sparse.keyed import KeyedTensor
from meshrec.compat.bridge.sparse.keyed_jagged import KeyedJaggedTensor

__all__ = ["JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]
