"""One module deletes, and only what is proven to be ours."""

import ast
import os
from pathlib import Path

import pytest

from meshrec.durable import CreatedPath, remove_empty, remove_link, remove_named
from meshrec.durable.removal import remove_tree

SOURCE = Path(__file__).parents[2] / "src" / "meshrec"
OWNER = "durable/removal.py"
RENAMING = {"durable/files.py", "durable/scratch.py"}
"""Files that rename what they have created over what their caller names."""
DELETING = {
    *("rmtree", "unlink", "rmdir", "removedirs", "TemporaryDirectory", "NamedTemporaryFile"),
    *("mkdtemp", "mkstemp", "os.remove", "os.truncate"),
}
RENAMES = {"os.replace", "os.rename", "os.renames", "shutil.move", "rename"}


def called(call: ast.Call) -> set[str]:
    """Return how a call names its function: ``replace`` and ``os.replace``."""
    if isinstance(call.func, ast.Name):
        return {call.func.id}
    if not isinstance(call.func, ast.Attribute):
        return set()
    owner = call.func.value.id if isinstance(call.func.value, ast.Name) else ""
    return {call.func.attr, f"{owner}.{call.func.attr}"}


def violations(path: str, text: str) -> list[str]:
    """Return the calls and imports of a file that delete, or that rename over other files."""
    forbidden = set() if path == OWNER else DELETING
    renames = set() if path in RENAMING else RENAMES
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            # The `replace` of a path takes one argument, that of a text two.
            arguments = (len(node.args), len(node.keywords))
            is_of_path = isinstance(node.func, ast.Attribute) and arguments == (1, 0)
            is_of_path = is_of_path and called(node).isdisjoint({"dataclasses.replace"})
            bad = called(node) & (forbidden | renames | ({"replace"} if renames and is_of_path else set()))
            names += [f"{path}:{node.lineno} calls {name}" for name in sorted(bad)[:1]]
        elif isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil", "tempfile"):
            bad = {alias.name for alias in node.names} - {"PathLike", "fspath", "which", "gettempdir"}
            names += [f"{path}:{node.lineno} imports {name}" for name in sorted(bad)]
    return names


def test_nothing_else_deletes():
    files = {str(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.py")}
    assert OWNER in files
    assert set(files) >= RENAMING
    assert [line for path, text in sorted(files.items()) for line in violations(path, text)] == []


@pytest.mark.parametrize(
    "text",
    [
        "shutil.rmtree(folder)",
        "path.unlink(missing_ok=True)",
        "os.remove(path)",
        "path.parent.rmdir()",
        "with tempfile.TemporaryDirectory() as folder: pass",
        "os.replace(a, b)",
        "scratch.replace(path)",
        "path.rename(other)",
        "from shutil import rmtree",
        "from os import remove",
    ],
)
def test_a_deletion_elsewhere_is_noticed(text):
    assert violations("cli/train.py", text)
    assert not violations(
        "cli/train.py", "text.replace('a', 'b'); options.remove(word); replace(recipe, a=1)"
    )


def test_only_the_file_that_was_created_is_deleted(tmp_path):
    path = tmp_path / "file"
    descriptor, created = CreatedPath.create_file(path)
    os.close(descriptor)
    with pytest.raises(FileExistsError):
        CreatedPath.create_file(path)
    path.rename(tmp_path / "moved")
    path.write_text("of the user")
    created.remove()
    created.remove_tree()
    assert path.read_text() == "of the user"
    created._replace(path=tmp_path / "moved").remove()
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    created.remove()


def test_only_folders_that_were_created_are_deleted_and_only_empty(tmp_path):
    (tmp_path / "a").mkdir()
    created = CreatedPath.create_folders(tmp_path / "a" / "b" / "c")
    assert [each.path.name for each in created] == ["c", "b"]
    (tmp_path / "a" / "b" / "notes").write_text("")
    for each in created:
        each.remove()
    assert [path.name for path in (tmp_path / "a").rglob("*")] == ["b", "notes"]
    assert CreatedPath.create_folders(tmp_path / "a") == []
    with pytest.raises(FileExistsError):
        CreatedPath.create_folders(tmp_path / "a" / "b" / "notes")


def test_links_are_deleted_and_not_followed(tmp_path):
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    inside.mkdir()
    for name in ("one", "two", "three"):
        (inside / name).symlink_to(outside)
    remove_named(inside, ["one", "none", "."])
    assert remove_link(inside / "two")
    assert not remove_link(outside)
    assert not remove_empty(inside / "three")
    (inside / "deep").mkdir()
    (inside / "deep" / "link").symlink_to(outside)
    remove_tree(inside, last="three")
    assert not inside.exists()
    assert (outside / "kept").read_text() == "kept"


def refuse(path, **options):
    raise PermissionError(path)


def test_a_tree_that_cannot_be_deleted_keeps_its_last_file(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "mark").write_text("")
    with monkeypatch.context() as patch:
        patch.setattr("os.rmdir", refuse)
        remove_tree(tmp_path, last="mark")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "mark"]


@pytest.mark.parametrize("depth", [0, 1])
def test_folder_of_a_tree_swapped_for_a_link_is_not_followed(tmp_path, monkeypatch, depth):
    golden, run = tmp_path / "golden", tmp_path / "run"
    for folder in (golden, run):
        (folder / "sub").mkdir(parents=True)
        (folder / "sub" / "data").touch()
    swapped, listdir = (run, run / "sub")[depth], os.listdir

    def swap(folder):
        if os.path.samestat(os.fstat(folder), (tmp_path / "run").stat()):
            swapped.rename(tmp_path / "moved")
            swapped.symlink_to(golden)
        return listdir(folder)

    created = CreatedPath.at(run)
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", swap)
        created.remove_tree()
    assert (golden / "sub" / "data").exists()


@pytest.mark.parametrize("name", ["sub/data", "data"])
def test_folder_swapped_for_a_link_before_the_deletion_is_not_followed(tmp_path, monkeypatch, name):
    for folder in ("run", "golden"):
        (tmp_path / folder / "sub").mkdir(parents=True)
        (tmp_path / folder / name).touch()
    swapped, unlink = (tmp_path / "run" / name).parent, os.unlink

    def swap(path, **options):
        swapped.rename(tmp_path / "moved")
        swapped.symlink_to((tmp_path / "golden" / name).parent)
        unlink(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", swap)
        remove_named(tmp_path / "run", [name])
    assert (tmp_path / "golden" / name).exists()
    assert not (tmp_path / "moved" / "data").exists()


@pytest.mark.parametrize("name", ["../other", "link/other", "sub/../../other", "{}/other"])
def test_names_that_lead_elsewhere_delete_nothing(tmp_path, name):
    (tmp_path / "run" / "sub").mkdir(parents=True)
    (tmp_path / "other").touch()
    (tmp_path / "run" / "link").symlink_to(tmp_path)
    remove_named(tmp_path / "run", [name.format(tmp_path)])
    assert (tmp_path / "other").exists()
