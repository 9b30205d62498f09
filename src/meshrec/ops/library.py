"""The C++ kernels are loaded here. If nothing was compiled, the same ops are declared for the plain torch
versions.

The environment variable ``MESHREC_LIBRARY`` names another build of the kernels to load instead of the
installed one, as the sanitizer run does. If it names no file, the plain torch versions run.
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
    """Return the path of libmeshrec.so, for programs in C++. Without a compiler, the file does not exist."""
    return str(_KERNELS)


def schemas() -> list[str]:
    """Return the schemas of all ops in the namespace ``meshrec``, from ``schemas.inc``."""
    text = re.sub(r"//[^\n]*", "", (_HERE / "schemas.inc").read_text())
    calls = re.findall(r"SCHEMA\(((?:\s*\"[^\"]*\")+)\s*\)", text)
    return ["".join(re.findall(r"\"([^\"]*)\"", call)) for call in calls]


def _load() -> torch.library.Library | None:
    if _KERNELS.exists():
        torch.ops.load_library(str(_KERNELS))
        return None
    _logger.warning(
        "no compiled kernels at %s: the plain torch versions run, at a fraction of the speed. "
        "Install a C++20 compiler and reinstall meshrec to get them.",
        _KERNELS,
    )
    library = torch.library.Library("meshrec", "DEF")
    for schema in schemas():
        library.define(schema)
    return library


# Keep a reference: the ops of a Library end with it.
_library = _load()

has_kernels: bool = _library is None
"""Whether the compiled CPU kernels are used; otherwise the plain torch versions are."""


# These, too.
_implementations: list[torch.library.Library] = []


def implement(ops: Iterable[Callable[..., Any]], key: str = "CompositeExplicitAutograd") -> None:
    """Register functions as implementations of the ops with their names.

    Args:
        ops: the functions.
        key: the dispatch key; by default every backend without a kernel of its own.
    """
    library = torch.library.Library("meshrec", "IMPL")
    for op in ops:
        library.impl(op.__name__, op, key)
    _implementations.append(library)


def c_entry_points() -> ctypes.CDLL | None:
    """Return the plain C functions, which do not work on tensors; None if nothing was compiled."""
    return ctypes.CDLL(str(_KERNELS)) if has_kernels else None
