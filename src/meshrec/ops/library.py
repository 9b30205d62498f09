"""Loads the C++ kernels, or declares the same ops for the naive ones where nothing was compiled.

The environment variable ``MESHREC_LIBRARY`` names another build of the kernels to load in place of the
installed one (the sanitizer run does); where it names no file, the naive kernels serve.
"""

import ctypes
import logging
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

_logger = logging.getLogger("meshrec")
_HERE = Path(__file__).parent
_KERNELS = Path(os.environ.get("MESHREC_LIBRARY") or _HERE.parent / "libmeshrec.so")


def library_path() -> str:
    """Where libmeshrec.so is, for programs in C++; it is not there where no compiler built it."""
    return str(_KERNELS)


def schemas() -> list[str]:
    """The schemas of all ops in the namespace ``meshrec``, as ``schemas.inc`` lists them."""
    text = re.sub(r"//[^\n]*", "", (_HERE / "schemas.inc").read_text())
    calls = re.findall(r"SCHEMA\(((?:\s*\"[^\"]*\")+)\s*\)", text)
    return ["".join(re.findall(r"\"([^\"]*)\"", call)) for call in calls]


def _load() -> torch.library.Library | None:
    if _KERNELS.exists():
        torch.ops.load_library(str(_KERNELS))
        return None
    _logger.warning(
        "no compiled kernels at %s: the plain torch kernels serve, at a fraction of the speed. "
        "Install a C++20 compiler and reinstall meshrec to get them.",
        _KERNELS,
    )
    library = torch.library.Library("meshrec", "DEF")
    for schema in schemas():
        library.define(schema)
    return library


# Kept alive: a Library takes its ops with it when it is collected.
_library = _load()

has_kernels: bool = _library is None
"""Whether the compiled CPU kernels serve; otherwise the naive ones do."""


# Kept alive, too.
_implementations: list[torch.library.Library] = []


def implement(ops: Iterable[Callable[..., Any]], key: str = "CompositeExplicitAutograd") -> None:
    """Has functions serve the ops of their names.

    Args:
        ops: the functions.
        key: the dispatch key; by default every backend that has no kernel of its own.
    """
    library = torch.library.Library("meshrec", "IMPL")
    for op in ops:
        library.impl(op.__name__, op, key)
    _implementations.append(library)


def c_entry_points() -> ctypes.CDLL | None:
    """The plain C functions, for what is no operation on tensors; None where nothing was compiled."""
    return ctypes.CDLL(str(_KERNELS)) if has_kernels else None
