"""Every ``Example::`` block in a docstring runs, with the names of its module and torch.

A block with prompts (``>>>``) also prints what it says.
"""

import ast
import doctest
import importlib
import inspect
import textwrap
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).parents[1] / "src"


def examples():
    for path in sorted(SOURCE.rglob("*.py")):
        source = path.read_text()
        if "Example::" not in source:
            continue
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            _, marker, text = inspect.cleandoc(ast.get_docstring(node) or "").partition("Example::\n")
            if marker:
                lines = text.split("\n")
                end = next((n for n, line in enumerate(lines) if line[:1].strip()), len(lines))
                code = textwrap.dedent("\n".join(lines[:end]))
                yield pytest.param(module, code, id=f"{module}.{getattr(node, 'name', '')}")


@pytest.mark.parametrize(("module", "code"), list(examples()))
def test_example_in_docstring_runs(module, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"torch": torch, **vars(importlib.import_module(module))}
    if ">>> " not in code:
        exec(compile(code, module, "exec"), names)
        return
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    report = []
    runner.run(doctest.DocTestParser().get_doctest(code, names, module, None, 0), out=report.append)
    assert not report, "".join(report)
