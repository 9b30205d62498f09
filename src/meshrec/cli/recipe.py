"""``meshrec recipe``: write a recipe as YAML."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from meshrec.cli.arguments import check_output, parse_subcommand
from meshrec.train.recipe_files import resolve
from meshrec.train.yaml_recipes import to_yaml


@dataclass(frozen=True, kw_only=True)
class ToYamlOptions:
    """Write a recipe as YAML, without default values. Train it with `meshrec train FILE.yaml`."""

    recipe: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")]
    """Recipe, as for meshrec train."""
    out: Path | None = None
    """File to write; none: print the YAML. Relative paths in a recipe file become absolute."""
    force: bool = False
    """Replace an existing file."""


def main(arguments: Sequence[str]) -> int:
    options: ToYamlOptions = parse_subcommand(ToYamlOptions, arguments, command="recipe", name="to-yaml")
    check_output(options.out, force=options.force)
    text = to_yaml(resolve(options.recipe))
    if options.out is None:
        print(text, end="")
    else:
        options.out.write_text(text, encoding="utf-8")
        print(f"to train it: meshrec train {options.out}")
    return 0
