"""Parsing of command-line arguments with ``tyro``, and checks of output paths."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import tyro
from rich.console import Console
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

HELP = ("-h", "--help")
_NONE = "none"
# Rules where these commands differ from tyro: the word none, lists, and values that only Python can build.
_REGISTRY = ConstructorRegistry()

Words = Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="(default: none)")]
"""Any number of words; none by default."""


class UsageError(ValueError):
    """A mistake in a command's arguments."""

    exit_code = 2


@_REGISTRY.primitive_rule
def _optional_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Read ``int | None`` as a number or the word ``none``."""
    inner_types = [argument for argument in get_args(info.type) if argument is not NoneType]
    if len(inner_types) != 1 or NoneType not in get_args(info.type):
        return None
    inner = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(inner_types[0], info.markers))
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
def _tuple_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Read ``tuple[int, ...]`` as one value or more: an option without any is a mistake."""
    match get_args(info.type):
        case (element, dots) if get_origin(info.type) is tuple and dots is Ellipsis:
            inner = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(element, info.markers))
        case _:
            return None
    if not isinstance(inner, PrimitiveConstructorSpec) or inner.nargs != 1:
        return None
    return PrimitiveConstructorSpec(
        nargs="*",  # and not "+", which the default of an empty tuple would have to satisfy
        metavar=f"{inner.metavar} [{inner.metavar} ...]",
        instance_from_str=lambda words: tuple(
            inner.instance_from_str([word]) for word in _require_words(words)
        ),
        is_instance=lambda value: isinstance(value, tuple) and all(map(inner.is_instance, value)),
        str_from_instance=lambda value: [word for item in value for word in inner.str_from_instance(item)],
        choices=inner.choices,
    )


def _require_words(words: list[str]) -> list[str]:
    """Return the words; raise ValueError if there are none."""
    if not words:
        raise ValueError("it needs a value. Arguments without a name, such as RUN, come first.")
    return words


@_REGISTRY.primitive_rule
def _python_only_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Give types that only Python can build, features and frames, an option which refuses every value."""
    if info.type is not Any and not _is_frame(info.type) and not _is_features(info.type):
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="PYTHON",
        instance_from_str=_refuse_value,
        is_instance=lambda value: True,
        str_from_instance=lambda value: [type(value).__name__],
    )


def _is_frame(kind: Any) -> bool:
    """Return whether a type is an in-memory table, such as a pandas frame.

    A recipe's field of type ``Any`` is parsed with the type of its value, so such types get here.
    """
    of = getattr(kind, "__module__", "")
    return hasattr(kind, "__arrow_c_stream__") or of.startswith(("pandas.", "datasets."))


def _is_features(kind: Any) -> bool:
    """Return whether a type is `Features` or another dataclass with its own JSON format."""
    return dataclasses.is_dataclass(kind) and hasattr(kind, "from_json")


def _refuse_value(words: Sequence[str]) -> Any:
    """Raise ValueError for an option whose value only Python can build."""
    raise ValueError(f"{words[0]!r}: an option cannot hold such a value. Set it in the recipe's file.")


def _is_none(words: Sequence[str]) -> bool:
    """Return whether the words are the single word ``none``."""
    return [word.lower() for word in words] == [_NONE]


def parse(kind: Any, arguments: Sequence[str], *, program: str, description: str | None = None) -> Any:
    """Parse arguments to an instance of a dataclass, or of a union of dataclasses, which are subcommands.

    Args:
        kind: The dataclass or the union.
        arguments: The words of the command line, without the command.
        program: The name of the command in its help.
        description: The text above the options; None: the docstring of ``kind``.

    Raises:
        SystemExit: An argument is wrong (2), or help was requested (0). tyro has printed which, and the
            nearest options.
    """
    # A field that is a union becomes options of its default, not subcommands.
    config = (tyro.conf.AvoidSubcommands,)
    with _REGISTRY:
        return tyro.cli(kind, args=list(arguments), prog=program, description=description, config=config)


def parse_known(kind: Any, arguments: Sequence[str], *, program: str) -> tuple[Any, list[str]]:
    """Parse the options of a dataclass; return the instance, and the arguments that it does not have.

    ``--help`` is one of the latter.

    Args:
        kind: The dataclass.
        arguments: The words of the command line, without the command.
        program: The name of the command in errors.
    """
    with _REGISTRY:
        return tyro.cli(kind, args=list(arguments), prog=program, return_unknown_args=True, add_help=False)


def check_output(path: Path | None, *, force: bool, option: str = "--out") -> None:
    """Raise ValueError if a file cannot be written. Commands call this before the work, not after it.

    Args:
        path: the file.
        force: whether it may replace one that exists.
        option: the option that names it.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name the file to write in it.")
    if path.exists() and not force:
        raise ValueError(f"{path} is there already; name another {option}, or replace it: --force.")
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no folder {path.parent}. Make it first.")


def parse_subcommand(kind: Any, arguments: Sequence[str], *, command: str, name: str) -> Any:
    """Parse the arguments of a command with a single subcommand, such as ``delta verify``.

    Args:
        kind: The dataclass of the subcommand.
        arguments: The words of the command line, without the command.
        command: The name of the command.
        name: The name of the subcommand, which comes first.

    Raises:
        UsageError: The subcommand is missing, or has another name.
    """
    first, remaining = (arguments[0], arguments[1:]) if arguments else (None, ())
    if first in HELP:
        first, remaining = name, HELP[1:]
    if first != name:
        mistake = f"give its command: {name}"
        if first is not None:
            mistake = f"there is no command {first!r}; there is {name}"
        raise UsageError(f"{command}: {mistake}. `meshrec {command} --help` lists its options.")
    return parse(kind, remaining, program=f"meshrec {command} {name}")


def wide_console(width: int) -> Console:
    """Return a console that is ``width`` characters wide where the output is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=width)
