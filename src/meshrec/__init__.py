"""Sharded embedding tables for recommender models, on PyTorch."""

import sys
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from meshrec.lazy import import_on_use, without_gc

if TYPE_CHECKING:
    from meshrec.estimators import Classifier, Ranker, Recommender, Regressor
    from meshrec.modules import (
        BoundsCheckMode,
        DataType,
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        EmbeddingCollection,
        EmbeddingConfig,
        PoolingType,
    )
    from meshrec.modules.fusing import fuse
    from meshrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
    from meshrec.tables.cached.rows import FileRows
    from meshrec.tables.hashed.keys import Hashed

    __version__: str

__all__ = [
    "BoundsCheckMode",
    "Classifier",
    "DataType",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "FileRows",
    "Hashed",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "PoolingType",
    "Ranker",
    "Recommender",
    "Regressor",
    "__version__",
    "fuse",
]

_import_public_name = import_on_use(__name__)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used. ``__version__`` is read from the installed package."""
    if name == "__version__":
        from importlib.metadata import version

        return version("meshrec")
    return _import_public_name(name)


# In a program that imports meshrec, import the public names now, which also registers the operators. But not
# in the command (`meshrec` or `python -m meshrec`): it must answer `--help` and Ctrl-C at once, and importing
# torch takes seconds. The estimators need packages that the core does not need.
if sys.argv[:1] != ["-m"] and PurePath(sys.argv[0] if sys.argv else "").name != "meshrec":
    with without_gc():
        for _name in __all__:
            if _name not in ("Classifier", "Ranker", "Recommender", "Regressor", "__version__"):
                _import_public_name(_name)
        # Lets the threads of process groups end before the interpreter does; see there.
        import meshrec.comms.leaving  # noqa: F401
