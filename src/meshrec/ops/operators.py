"""The operators as Python functions that raise the same exceptions with all torch versions.

[Note: errors of operators]

Every attribute in this module is the operator ``torch.ops.meshrec.<name>`` wrapped by
`with_translated_errors`. torch decides which Python exception a C++ exception becomes. Up to torch 2.14,
``std::invalid_argument`` becomes a ValueError; from 2.15 on, a RuntimeError, like memory errors. Kernels
therefore start messages about invalid input with `INVALID`, and the wrapper raises `InputError` or
`OutOfMemoryError` with any torch version.

Compiled and exported graphs, TorchScript and AOTInductor call the operators without the wrapper. Code that
runs such a program passes exceptions to `translate_error`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from meshrec.ops import library  # noqa: F401 - loads the operators

# Must equal the prefix that fail() in csrc/stable_abi.h writes.
INVALID = "invalid input: "
"""Prefix of kernel messages about invalid input, as in csrc/stable_abi.h."""
# Prefixes of memory errors: from the kernels, the C++ library, and torch.
_NO_MEMORY = "not enough memory: "
_BAD_ALLOC = "std::bad_alloc"
_TORCH = "DefaultCPUAllocator: can't allocate memory"


class InputError(ValueError):
    """An operator was called with invalid input."""


class OutOfMemoryError(MemoryError, RuntimeError):
    """An operator could not allocate memory. Also a RuntimeError, like torch's own error."""


def translate_error(error: Exception) -> Exception:
    """Return the exception to raise for an exception from an operator: `InputError` or `OutOfMemoryError`.

    Other exceptions are returned unchanged. Nothing is raised.
    """
    if isinstance(error, InputError | OutOfMemoryError):
        return error
    text = str(error)
    # The message may follow text that torch adds.
    _, prefix, message = text.partition(INVALID)
    if prefix:
        return InputError(message)
    if isinstance(error, ValueError):  # raised by a plain torch version, without the prefix
        return InputError(text)
    if isinstance(error, MemoryError) or text.startswith((_NO_MEMORY, _BAD_ALLOC)) or _TORCH in text:
        return OutOfMemoryError(text)
    return error


def with_translated_errors(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls an operator, and raises errors as translated by `translate_error`."""

    @functools.wraps(operator, assigned=("__doc__",), updated=())
    def call(*arguments: Any, **options: Any) -> Any:
        """Call the operator, and translate its exceptions."""
        try:
            return operator(*arguments, **options)
        except (ValueError, MemoryError, RuntimeError) as error:
            error_to_raise = translate_error(error)
            try:
                if error_to_raise is error:
                    raise
                # Without the original exception, because the new one has the same message.
                raise error_to_raise from None
            finally:
                del error_to_raise  # a cycle between the traceback and this frame would keep tensors alive

    return call


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the operator ``torch.ops.meshrec.<name>``, wrapped by `with_translated_errors`."""
    if name.startswith("__"):
        raise AttributeError(name)
    # Cached, because every training step calls a dozen operators.
    call = globals()[name] = with_translated_errors(getattr(torch.ops.meshrec, name).default)
    return call
