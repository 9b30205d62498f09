"""Write the short help for a command with a recipe: all options on a single screen."""

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from meshrec.train.recipe import Recipe

# Width of the page, and of the column with the group names, in characters.
_WIDTH = 100
_INDENT = 12


def recipe_help(command: str, recipe: Recipe, options: Any, *, summary: str) -> str:
    """Return the help page for a command with a recipe.

    The page explains the command's options, and lists the recipe's options with their values, by group.

    Args:
        command: command with the recipe, such as ``meshrec train movielens``.
        recipe: the recipe. Its fields are the groups.
        options: the command's options class, whose field docstrings explain the options.
        summary: description of the command, a single line.
    """
    lines = [f"usage: {command} [OPTIONS]", summary, "", "options of the run:"]
    for name, text in _option_summaries(options):
        lines.append(f"  {name:28}{textwrap.shorten(text, _WIDTH - 30, placeholder=' ...')}")
    lines += ["", "options of the recipe, with the values that it has:"]
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        # The recipe's name is not an option.
        if not dataclasses.is_dataclass(value):
            continue
        words = "  ".join(_option_words(field.name, value)) or "(it has no options)"
        lines += textwrap.wrap(
            # Single spaces become NUL, so that an option and its value stay on the same line.
            words.replace(" ", "\0").replace("\0\0", "  "),
            _WIDTH,
            initial_indent=f"  {field.name:{_INDENT - 2}}",
            subsequent_indent=" " * _INDENT,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join([*lines, "", f"`{command} --help-all` explains every option."]).replace("\0", " ")


def _option_summaries(kind: Any) -> Iterator[tuple[str, str]]:
    """Yield pairs (option, summary) for the fields in an options class, such as ("--name NAME", "Run name").

    The summary is the first clause of the field's docstring. Switches do not have a placeholder such as NAME.
    Fields without a default are left out.
    """
    # Field docstrings exist only in the source code. Inherited fields come first.
    classes = [base for base in reversed(kind.__mro__) if base is not object]
    statements: list[ast.stmt] = []
    for base in classes:
        (of_class,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(of_class, ast.ClassDef)
        statements += of_class.body
    for field, after in itertools.pairwise(statements):
        if not isinstance(field, ast.AnnAssign) or field.value is None or not isinstance(after, ast.Expr):
            continue
        name, text = (
            ast.unparse(field.target).rstrip("_"),
            " ".join(str(ast.literal_eval(after.value)).split()),
        )
        value = "" if ast.unparse(field.annotation) == "bool" else f" {name.rpartition('_')[2].upper()}"
        yield f"--{name.replace('_', '-')}{value}", re.split(r"[;:.] ", text)[0].rstrip(".")


def _option_words(prefix: str, value: Any) -> Iterator[str]:
    """Yield the option and current value for every field in a dataclass, as ``--PREFIX.FIELD VALUE``.

    For a switch, yield the option that changes the current value. For a nested dataclass, yield the number of
    options in it.
    """
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        name = f"{prefix}.{field.name.replace('_', '-')}"
        if dataclasses.is_dataclass(inner) and not hasattr(inner, "from_json"):
            yield f"--{name}.* ({len(dataclasses.fields(inner))} options)"
        elif isinstance(inner, bool):  # the flag that would change it
            yield f"--{prefix}.{'no-' if inner else ''}{field.name.replace('_', '-')}"
        else:
            yield f"--{name} {_format_value(inner)}"


def _format_value(value: Any) -> str:
    """Return a value as on the command line, or a note that it can only be set in the recipe."""
    if isinstance(value, tuple | list) and any(map(dataclasses.is_dataclass, value)):
        return f"({len(value)} of {type(value[0]).__name__}: edit them in the recipe)"
    if isinstance(value, tuple | list):
        return " ".join(map(_format_value, value)) or "none"
    if value is None or isinstance(value, str | int | float):
        return "none" if value is None else str(value)
    return f"({type(value).__name__}: edit it in the recipe)"
