"""How arguments are read: ``tyro.cli``, in the words of one who reads ``--help``."""

from collections.abc import Sequence
from types import NoneType
from typing import Any, get_args

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

_NONE = "none"
_REGISTRY = ConstructorRegistry()


@_REGISTRY.primitive_rule
def _value_or_none(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Of ``int | None``: a number, or the word none."""
    others = [each for each in get_args(info.type) if each is not NoneType]
    if len(others) != 1 or NoneType not in get_args(info.type):
        return None
    inner = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(others[0], info.markers))
    if not isinstance(inner, PrimitiveConstructorSpec):
        return None
    choices = None if inner.choices is None else (*inner.choices, _NONE)
    return PrimitiveConstructorSpec(
        nargs=inner.nargs,
        metavar=inner.metavar if choices is None else f"{{{','.join(choices)}}}",
        instance_from_str=lambda words: None if _is_none(words) else inner.instance_from_str(words),
        is_instance=lambda value: value is None or inner.is_instance(value),
        str_from_instance=lambda value: [_NONE] if value is None else inner.str_from_instance(value),
        choices=choices,
    )


@_REGISTRY.primitive_rule
def _object(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """What only Python can make, such as features and frames: no option."""
    if info.type is not Any and not _is_frame(info.type):
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="PYTHON",
        instance_from_str=_only_python,
        is_instance=lambda value: True,
        str_from_instance=lambda value: [type(value).__name__],
    )


def _is_frame(kind: Any) -> bool:
    """Whether it is of tables in memory: a field of any type has that of its value here."""
    of = getattr(kind, "__module__", "")
    return hasattr(kind, "__arrow_c_stream__") or of.startswith(("pandas.", "datasets."))


def _only_python(words: Sequence[str]) -> Any:
    raise ValueError(f"{words[0]!r}: no option can say this. Set it in the recipe's function.")


def _is_none(words: Sequence[str]) -> bool:
    return [word.lower() for word in words] == [_NONE]


def parse(kind: Any, arguments: Sequence[str], *, program: str, description: str | None = None) -> Any:
    """What ``arguments`` say, as a ``kind``: a dataclass, or a union of them as subcommands.

    Args:
        program: What the help calls the command.
        description: Above its options; otherwise the docstring of ``kind``.

    Raises:
        SystemExit: The help was asked for (0), or an argument is wrong (2): both are printed.
    """
    config = (tyro.conf.AvoidSubcommands,)
    with _REGISTRY:
        return tyro.cli(kind, args=list(arguments), prog=program, description=description, config=config)
