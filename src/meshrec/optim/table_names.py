"""Unique names for the tables in a model.

Several modules may have a table with the same name in its config. Such a table is called ``path.name``, with
the module's path in the model; other tables keep the name in the config.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def full_names(tables: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], str]:
    """Return the unique name of each table, keyed by (module path, config name).

    A name that only one module uses stays as it is. Otherwise the unique name is ``path.name``. For example,
    ``{"a": ["t", "u"], "b": ["t"]}`` gives the names a.t, u and b.t.

    Args:
        tables: Table names by module path.
    """
    # Two modules may have equal configs, so only a name with a single owner is unique.
    owners = _owners(tables)
    return {
        (path, name): name if len(owners[name]) == 1 else _joined(path, name)
        for path, names in tables.items()
        for name in names
    }


def by_full_name(options: Mapping[str, T], tables: Mapping[str, Sequence[str]], subject: str) -> dict[str, T]:
    """Return the given options keyed by unique table name; see ``full_names``.

    Args:
        options: An option per table, keyed by config name (if unique) or ``path.name``.
        tables: Table names by module path.
        subject: Start of error messages, such as "constraints name".

    Raises:
        ValueError: A name matches none or several tables, or a table is named twice.
    """
    # Both the unique name and the full path are accepted.
    names, owners = full_names(tables), _owners(tables)
    matches = {full: full for full in names.values()} | {_joined(*path): full for path, full in names.items()}
    # Distinguish ambiguous from unknown names in the message.
    for name in options:
        if name not in matches and name in owners:
            paths = [_joined(path, name) for path in owners[name]]
            raise ValueError(f"{subject} {name!r}, which several modules have. Name one of {paths}.")
        if name not in matches:
            raise ValueError(
                f"{subject} {name!r}, which is not a table of the model; it has {sorted(names.values())}."
            )
    # A table may be named by the short and the full name.
    duplicates = [name for name in options if matches[name] != name and matches[name] in options]
    if duplicates:
        raise ValueError(
            f"{subject} one table twice, as {duplicates[0]!r} and {matches[duplicates[0]]!r}. Name it once."
        )
    return {matches[name]: value for name, value in options.items()}


def by_module(
    options: Mapping[str, T], tables: Mapping[str, Sequence[str]], subject: str
) -> dict[str, dict[str, T]]:
    """Return the given options keyed by module path, then by config name; see ``by_full_name``.

    Args:
        options: An option per table, keyed by config name (if unique) or ``path.name``.
        tables: Table names by module path.
        subject: Start of error messages.

    Raises:
        ValueError: A name matches none or several tables, or a table is named twice.
    """
    names, resolved = full_names(tables), by_full_name(options, tables, subject)
    # Modules without an option get an empty dict.
    return {
        path: {name: resolved[names[path, name]] for name in table_names if names[path, name] in resolved}
        for path, table_names in tables.items()
    }


def _owners(tables: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return, for every table name in a config, the paths of all modules with such a table."""
    owners: dict[str, list[str]] = {}
    for path, names in tables.items():
        for name in names:
            owners.setdefault(name, []).append(path)
    return owners


def _joined(path: str, name: str) -> str:
    """Return ``path.name``; for the root module, whose path is empty, the name alone."""
    return f"{path}.{name}" if path else name
