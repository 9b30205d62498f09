"""Parse command-line arguments with ``tyro``, and check output paths.

An options class is a dataclass. Field names become options, and field docstrings become help.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import tyro
from rich.console import Console
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

# Recognized before tyro parses, for commands that print their own help page.
HELP = ("-h", "--help")
# Word for None on the command line, and in the help page.
_NONE = "none"
# Rules by which these commands differ from tyro: for the word none, for lists, and for values that cannot be
# given on a command line.
_REGISTRY = ConstructorRegistry()

Words = Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="(default: none)")]
"""Option type: any number of words, empty by default."""


class UsageError(ValueError):
    """Raised for a mistake in a command's arguments."""

    # Exit code for wrong arguments, as in argparse. Other errors have exit code 1.
    exit_code = 2


@_REGISTRY.primitive_rule
def _optional_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """tyro rule for optional types: ``int | None`` is given as an integer or as the word ``none``.

    Return None for all other types, to which the rule does not apply.
    """
    inner_types = [argument for argument in get_args(info.type) if argument is not NoneType]
    # Not of the form X | None.
    if len(inner_types) != 1 or NoneType not in get_args(info.type):
        return None
    inner = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(inner_types[0], info.markers))
    if not isinstance(inner, PrimitiveConstructorSpec):
        return None
    choices = None if inner.choices is None else (*inner.choices, _NONE)
    return PrimitiveConstructorSpec(
        nargs=inner.nargs,
        metavar=inner.metavar if choices is None else f"{{{','.join(choices)}}}",
        instance_from_str=lambda words: (
            None if [word.lower() for word in words] == [_NONE] else inner.instance_from_str(words)
        ),
        is_instance=lambda value: value is None or inner.is_instance(value),
        str_from_instance=lambda value: [_NONE] if value is None else inner.str_from_instance(value),
        choices=choices,
    )


@_REGISTRY.primitive_rule
def _tuple_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """tyro rule for lists: ``tuple[int, ...]`` is given as at least one value after the option.

    Return None for all other types, to which the rule does not apply.
    """
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
    """Return the words unchanged, or raise ValueError if the list is empty."""
    if not words:
        raise ValueError("it needs a value. Arguments without a name, such as RUN, come first.")
    return words


@_REGISTRY.primitive_rule
def _python_only_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """tyro rule for types with values that only Python can create: `Features`, data frames, and ``Any``.

    An option of such a type refuses every value. Return None for all other types, to which the rule does not
    apply.
    """
    # Features, and other dataclasses with a JSON format.
    is_features = dataclasses.is_dataclass(info.type) and hasattr(info.type, "from_json")
    if info.type is not Any and not _is_frame(info.type) and not is_features:
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

    tyro parses a recipe field of type ``Any`` with the type of the field's value, so rules see such types.
    """
    of = getattr(kind, "__module__", "")
    return hasattr(kind, "__arrow_c_stream__") or of.startswith(("pandas.", "datasets."))


def _refuse_value(words: Sequence[str]) -> Any:
    """Raise ValueError, because the option's value can only be created in Python."""
    raise ValueError(f"{words[0]!r}: an option cannot hold such a value. Set it in the recipe's file.")


def parse(kind: Any, arguments: Sequence[str], *, program: str, description: str | None = None) -> Any:
    """Parse command-line arguments, and return an instance of the options class.

    Args:
        kind: options class, or a union of options classes, which are subcommands.
        arguments: words after the command.
        program: command name in the help.
        description: help text above the options; None: the docstring of ``kind``.

    Raises:
        SystemExit: an argument is wrong (code 2), or help was requested (code 0). tyro has printed the
            reason.
    """
    # For a field with a union type, tyro would create subcommands. This makes it use the default's class.
    config = (tyro.conf.AvoidSubcommands,)
    with _REGISTRY:
        return tyro.cli(kind, args=list(arguments), prog=program, description=description, config=config)


def parse_known(kind: Any, arguments: Sequence[str], *, program: str) -> tuple[Any, list[str]]:
    """Parse the options in a class, and return all other arguments unparsed.

    Args:
        kind: options class.
        arguments: words after the command.
        program: command name in errors.

    Returns:
        Instance of the options class, and all other arguments, including ``--help``.
    """
    with _REGISTRY:
        return tyro.cli(kind, args=list(arguments), prog=program, return_unknown_args=True, add_help=False)


TABLES = (".parquet", ".csv")
"""Suffixes of the files that commands write tables to."""


def check_output(
    path: Path | None, *, force: bool, option: str = "--out", suffixes: Sequence[str] = ()
) -> None:
    """Check that an output file can be written. Commands call this before they start to work.

    Args:
        path: the file; None: nothing to check.
        force: whether an existing file may be replaced.
        option: option by which the user named the file, for errors.
        suffixes: allowed suffixes; empty: any.

    Raises:
        ValueError: the path is a folder, the file exists, the parent folder does not exist, or the suffix is
            another one.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name the file to write in it.")
    if path.exists() and not force:
        raise ValueError(f"{path} is there already; name another {option}, or replace it: --force.")
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no folder {path.parent}. Make it first.")
    if suffixes and path.suffix not in suffixes:
        raise ValueError(
            f"{path} ends in {path.suffix!r}; the file is written as {' or '.join(suffixes)}. Name one of "
            "these."
        )


def parse_subcommand(kind: Any, arguments: Sequence[str], *, command: str, name: str) -> Any:
    """Parse arguments for a command with a single subcommand, such as ``delta verify``.

    Args:
        kind: options class for the subcommand.
        arguments: words after the command. The first must be the subcommand.
        command: command name.
        name: subcommand name.

    Raises:
        UsageError: the subcommand is missing, or has another name.
    """
    first, remaining = (arguments[0], arguments[1:]) if arguments else (None, ())
    # The help of the command is the help of its only subcommand.
    if first in HELP:
        first, remaining = name, HELP[1:]
    if first != name:
        mistake = f"give its command: {name}"
        if first is not None:
            mistake = f"there is no command {first!r}; there is {name}"
        raise UsageError(f"{command}: {mistake}. `meshrec {command} --help` lists its options.")
    return parse(kind, remaining, program=f"meshrec {command} {name}")


def wide_console(width: int) -> Console:
    """Return a rich console, which is ``width`` characters wide if the output is not a terminal."""
    # Without a terminal, rich would wrap tables at 80 characters.
    console = Console()
    return console if console.is_terminal else Console(width=width)
