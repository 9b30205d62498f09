"""Load the C++ kernels, or declare the operators for the plain torch versions.

If the environment variable ``MESHREC_LIBRARY`` is set, it names the library to load, such as a sanitizer
build. If the file does not exist, the plain torch versions run.
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
# Read once: setting the variable after the import has no effect.
_KERNELS = Path(os.environ.get("MESHREC_LIBRARY") or _HERE.parent / "libmeshrec.so")


def library_path() -> str:
    """Return the path of libmeshrec.so, for C++ programs that load it. The file may be missing."""
    return str(_KERNELS)


def schemas() -> list[str]:
    """Return the schemas of all operators in the namespace ``meshrec``, read from ``schemas.inc``."""
    # The C++ preprocessor reads the same file, so strip comments and join adjacent string literals here.
    # No schema contains "//", so comments end at the line end.
    text = re.sub(r"//[^\n]*", "", (_HERE / "schemas.inc").read_text())
    calls = re.findall(r"SCHEMA\(((?:\s*\"[^\"]*\")+)\s*\)", text)
    return ["".join(re.findall(r"\"([^\"]*)\"", call)) for call in calls]


def _load() -> torch.library.Library | None:
    """Load the compiled kernels and return None. Without kernels, return a torch library with all schemas."""
    if _KERNELS.exists():
        # The library declares the schemas and registers the CPU kernels itself.
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


# torch.library.Library unregisters the operators when it is garbage collected.
_library = _load()

has_kernels: bool = _library is None
"""Whether the compiled CPU kernels are loaded. Otherwise the plain torch versions run."""


# Kept alive for the same reason as ``_library``.
_implementations: list[torch.library.Library] = []


def implement(ops: Iterable[Callable[..., Any]], key: str = "CompositeExplicitAutograd") -> None:
    """Register Python functions as implementations of the operators that have the same names.

    Args:
        ops: functions, named after operators in ``schemas.inc``.
        key: dispatch key. The default covers all backends that have no implementation registered.
    """
    # With the default key, compiled kernels for the CPU and Triton kernels for CUDA take precedence.
    library = torch.library.Library("meshrec", "IMPL")
    for op in ops:
        library.impl(op.__name__, op, key)
    _implementations.append(library)


def register_fakes(**fakes: Callable[..., object]) -> None:
    """Register functions that return the output shapes for tracing (fake kernels), by operator name."""
    for name, fake in fakes.items():
        torch.library.register_fake(f"meshrec::{name}", fake)


def dynamic_size() -> Any:
    """Return a symbolic size for a data-dependent dimension. Called by fake kernels."""
    return torch.library.get_ctx().new_dynamic_size()


def c_entry_points() -> ctypes.CDLL | None:
    """Return the compiled library for calls to C functions without tensors. None without kernels."""
    # The system returns the library that torch has already loaded, with the same global state.
    return ctypes.CDLL(str(_KERNELS)) if has_kernels else None


def c_functions(**signatures: tuple[Any, list[Any]]) -> ctypes.CDLL | None:
    """Declare the types of some C functions in the compiled library, and return the library.

    Returns None if a function is missing: without kernels, or if ``MESHREC_LIBRARY`` names an older library.

    Args:
        signatures: result type and argument types by function name, without the prefix ``meshrec_``.
            ``c_functions(add=(c_int, [c_int, c_int]))`` declares ``int meshrec_add(int, int)``.
    """
    library = c_entry_points()
    for name, (result, arguments) in signatures.items():
        # Without kernels, `library` is None, so the function is None too.
        function = getattr(library, f"meshrec_{name}", None)
        if function is None:
            return None
        # Without declared types, ctypes would truncate 64-bit results and pointers to int.
        function.restype, function.argtypes = result, arguments
    return library
