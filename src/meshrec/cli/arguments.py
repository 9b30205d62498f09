"""Parsing of command-line arguments with ``tyro``, with one-line error messages."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from meshrec.data.nearest import did_you_mean, nearest

HELP = ("-h", "--help")
_NONE = "none"
_REGISTRY = ConstructorRegistry()
_KINDS = {"INT": "a whole number", "FLOAT": "a number"}

Words = Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="(default: none)")]
"""Any number of words; none by default."""


class UsageError(ValueError):
    """A mistake in a command's arguments."""

    exit_code = 2


@_REGISTRY.primitive_rule
def _value_or_none(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Read ``int | None`` as a number or the word ``none``."""
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
    """Make an option that refuses every value, for types that only Python can build: features and frames."""
    if info.type is not Any and not _is_frame(info.type) and not _is_features(info.type):
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="PYTHON",
        instance_from_str=_only_python,
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
    return dataclasses.is_dataclass(kind) and hasattr(kind, "from_json")


def _only_python(words: Sequence[str]) -> Any:
    raise ValueError(f"{words[0]!r}: an option cannot hold such a value. Set it in the recipe's file.")


def _is_none(words: Sequence[str]) -> bool:
    return [word.lower() for word in words] == [_NONE]


def parse(kind: Any, arguments: Sequence[str], *, program: str, description: str | None = None) -> Any:
    """Read ``arguments`` as a ``kind``: a dataclass, or a union of dataclasses as subcommands.

    Args:
        kind: The dataclass or the union.
        arguments: The words of the command line, without the command.
        program: The name of the command in its help.
        description: The text above the options; if none, the docstring of ``kind``.

    Raises:
        UsageError: An argument is wrong.
        SystemExit: Help was requested, and is printed.
    """
    config = (tyro.conf.AvoidSubcommands,)
    commands = [name for name in map(_subcommand, get_args(kind)) if name is not None]
    if any(word in HELP for word in arguments):
        # tyro leaves options that are already given out of the help: drop the other words.
        arguments = [*(word for word in arguments[:1] if word in commands), HELP[1]]
    try:
        from tyro._errors import on_parse_error  # not public: other versions print their own box
    except ImportError:
        with _REGISTRY:
            return tyro.cli(kind, args=list(arguments), prog=program, description=description, config=config)

    def refuse(event: Any) -> None:
        names = list(option_names(kind))
        unknown = [each for each in arguments if _is_option(each) and _plain(each) not in names]
        text = _mistake(event, unknown, names, commands)
        if text is not None:
            raise UsageError(text)

    with _REGISTRY, on_parse_error(refuse):
        found = tyro.cli(kind, args=list(arguments), prog=program, description=description, config=config)
    _check_words(found, program)
    _check_lists(found, arguments, program)
    return found


def _check_lists(found: Any, arguments: Sequence[str], program: str) -> None:
    """Raise UsageError if an option that takes a list of words is given none."""
    for word, after in zip(arguments, [*arguments[1:], "--"], strict=False):
        if not _is_option(word) or "=" in word or not after.startswith("--"):
            continue
        path = _plain(word).lstrip("-").replace("-", "_").split(".")
        for start in (found, getattr(found, "options", None)):
            value = start
            for name in path:
                value = getattr(value, name, None)
            if value == ():
                raise UsageError(f"{program.removeprefix('meshrec ')}: {_plain(word)} needs a value.")


def _check_words(found: Any, program: str) -> None:
    """Raise UsageError if an argument that takes any number of words, and has no default, has none."""
    for each in dataclasses.fields(found):
        required = each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
        if not required or getattr(found, each.name) != ():
            continue
        hints = get_type_hints(type(found), include_extras=True)
        positional = {
            name: next(
                (note.metavar for note in get_args(hint) if getattr(note, "metavar", None)), name.upper()
            )
            for name, hint in hints.items()
            if tyro.conf.Positional in get_args(hint)
        }
        command = program.removeprefix("meshrec ")
        if each.name in positional:
            raise UsageError(
                f"{command}: {positional[each.name]} is missing. `{program} --help` lists its options."
            )
        option = f"--{each.name.replace('_', '-')}"
        order = f"`{program} {' '.join(positional.values())} {option} ...`"
        raise UsageError(
            f"{command}: {option} has no value: the word after it was taken for "
            f"{' '.join(positional.values())}. "
            f"Write {order}."
        )


def option_names(kind: Any, prefix: str = "") -> Iterator[str]:
    """Find the options of a dataclass, or of all dataclasses of a union: ``--training.batch-size``."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if not dataclasses.is_dataclass(kind):
        for each in get_args(kind):
            yield from option_names(each, prefix)
        return
    hints = get_type_hints(kind if isinstance(kind, type) else type(kind), include_extras=True)
    for each in dataclasses.fields(kind):
        hint = hints[each.name]
        notes = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        if tyro.conf.Positional in notes:
            continue
        flat = any(getattr(note, "name", None) == "" for note in notes)
        name = prefix if flat else f"{prefix}{each.name.replace('_', '-')}"
        value = each.default if isinstance(kind, type) else getattr(kind, each.name)
        inner = value if dataclasses.is_dataclass(value) else get_args(hint)[0] if notes else hint
        if dataclasses.is_dataclass(inner) and not _is_features(inner):
            yield from option_names(inner, name if flat else f"{name}.")
        else:
            yield f"--{name}"
            if hint is bool:
                yield f"--{prefix}no-{each.name.replace('_', '-')}"


def _plain(option: str) -> str:
    return "--" + option.partition("=")[0].lstrip("-").replace("_", "-")


def _is_option(word: str) -> bool:
    return word.startswith("-") and word not in ("-", "--", *HELP) and not re.match(r"-[.\d]|-inf", word)


def _subcommand(kind: Any) -> str | None:
    notes = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    return next((note.name for note in notes if hasattr(note, "name")), None)


def _mistake(event: Any, unknown: Sequence[str], names: Sequence[str], commands: Sequence[str]) -> str | None:
    """Describe in one line the mistake that tyro found; None for a kind of mistake that we do not know."""
    more = f"`{event.prog} --help` lists its options."
    command = event.prog.removeprefix("meshrec ")
    if unknown:
        return _unknown(unknown[0], command, names, more)
    match type(event).__name__:
        case "UnrecognizedArgs" | "MissingSubcommand" if commands:
            found = event.found_token if hasattr(event, "found_token") else event.tokens[0]
            if found is None:
                return f"{command}: give one of its commands: {', '.join(commands)}. {more}"
            return (
                f"{command}: there is no command {found!r}; there are {', '.join(commands)}."
                f"{did_you_mean(found, commands)}"
            )
        case "UnrecognizedArgs":
            return f"{command}: {' '.join(event.tokens)!r} is one argument too many. {more}"
        case "MissingArgs":
            missing = [_title(each.arg) for each in event.missing_arguments]
            verb = "is" if len(missing) == 1 else "are"
            return f"{command}: {' and '.join(missing)} {verb} missing. {more}"
        case "InvalidChoice":
            return (
                f"{_title(event.argument)} {event.value}: take one of {', '.join(event.choices)}."
                f"{did_you_mean(event.value, event.choices)}"
            )
        case "BadValue":
            takes = str(event.argument.lowered.metavar or "no value")
            return f"{command}: {_title(event.argument)} needs a value: {takes}. {more}"
        case "InstantiationFailure":
            return _refused(event)
    return None


def _title(argument: Any) -> str:
    lowered = argument.lowered
    return str(lowered.metavar) if argument.is_positional() else str(lowered.name_or_flags[-1])


def _refused(event: Any) -> str:
    """Name the option whose value was refused. Messages of our own are kept as they are."""
    message = str(event.message).strip()
    if event.argument is None:
        return message
    title, metavar = _title(event.argument), str(event.argument.lowered.metavar)
    word = re.search(r"(?:base 10|to float): '(.*)'$", message)
    wanted = next((text for kind, text in _KINDS.items() if kind in metavar), None)
    if word is not None and wanted is not None:
        return f"{title} {word[1]}: give {wanted}, such as {'4' if 'INT' in metavar else '0.01'}."
    if wanted is not None and message.startswith("Could not find valid parse"):
        given = " ".join(map(str, getattr(event, "arguments", ()) or re.findall(r"'([^']*)'", message)))
        example = "32 16" if "INT" in metavar else "0.9 0.99"
        return f"{title} {given}: give numbers with blanks between them, such as {example}."
    return f"{title}: {message}"


_MOST_OF_SECTION = 6
"""Options of a section that are listed for a word that is near none of them."""


def _unknown(option: str, command: str, names: Sequence[str], more: str) -> str:
    """Suggest the option with the nearest name: ``--training.epochs`` for ``--epochs``."""
    word = _plain(option)
    ends: dict[str, list[str]] = {}
    for name in names:
        ends.setdefault(name.rpartition(".")[2].lstrip("-"), []).append(name)
    tail = word.rpartition(".")[2].lstrip("-")
    section = (
        [name for name in names if name.startswith(f"{word.rpartition('.')[0]}.")] if "." in word else []
    )
    found = nearest(word, section or names) if "." in word else None
    near = [found] if found is not None else ends.get(tail) or ends.get(nearest(tail, ends) or "", [])
    guess = f" Did you mean {' or '.join(near[:3])}?" if near else ""
    if found is None and 0 < len(section) <= _MOST_OF_SECTION:
        guess = f" Did you mean one of {', '.join(section)}?"
    return f"{command}: there is no option {option.partition('=')[0]}.{guess} {more}"
