"""Sharded embedding tables for recommender models, on PyTorch."""

import sys
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from meshrec.lazy import importer, without_gc

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

_EXPORTS = {  # public names by defining module
    "meshrec.modules": [
        "BoundsCheckMode",
        "DataType",
        "EmbeddingBagCollection",
        "EmbeddingBagConfig",
        "EmbeddingCollection",
        "EmbeddingConfig",
        "PoolingType",
    ],
    "meshrec.modules.fusing": ["fuse"],
    "meshrec.tables.cached.rows": ["FileRows"],
    "meshrec.tables.hashed.keys": ["Hashed"],
    "meshrec.sparse": ["JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"],
}
# Never imported before they are used: they need packages that the core does not.
_ESTIMATORS = {"meshrec.estimators": ["Classifier", "Ranker", "Recommender", "Regressor"]}
_import_export = importer(__name__, _EXPORTS | _ESTIMATORS)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("meshrec")
    return _import_export(name)


# A program that imports meshrec gets it whole, its operators registered. The command, as `meshrec` or as
# `python -m meshrec`, answers `--help` and Ctrl-C before torch is there, which takes seconds to import.
if sys.argv[:1] != ["-m"] and PurePath(sys.argv[0] if sys.argv else "").name != "meshrec":
    with without_gc():
        for _name in (name for names in _EXPORTS.values() for name in names):
            globals()[_name] = _import_export(_name)
        import meshrec.comms.leaving  # noqa: F401  # so that programs end, see there
