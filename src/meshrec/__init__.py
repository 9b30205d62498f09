"""Sharded embedding tables for recommender models, on PyTorch."""

import importlib
import sys
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from meshrec.tables.file_rows import FileRows
    from meshrec.tables.hashed_keys import Hashed

    __version__: str

__all__ = [
    "BoundsCheckMode",
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
    "__version__",
    "fuse",
]

_HOMES = {
    "meshrec.modules": [*__all__[:6], "PoolingType"],
    "meshrec.modules.fusing": ["fuse"],
    "meshrec.tables.file_rows": ["FileRows"],
    "meshrec.tables.hashed_keys": ["Hashed"],
    "meshrec.sparse": ["JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("meshrec")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'meshrec' has no attribute {name!r}; use one of meshrec.__all__.")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


# A program that imports meshrec gets it whole, its operators registered. The command, as `meshrec` or as
# `python -m meshrec`, answers `--help` and Ctrl-C before torch is there, which takes seconds to import.
if sys.argv[:1] != ["-m"] and PurePath(sys.argv[0] if sys.argv else "").name != "meshrec":
    for _name, _home in _HOME_OF.items():
        globals()[_name] = getattr(importlib.import_module(_home), _name)
