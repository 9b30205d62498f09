"""Runs a tutorial, a script with prose in percent format, and writes it as Markdown with all it printed.

``python docs/literate.py examples/1_embeddings.py build/tutorials`` writes ``1_embeddings.md`` and what the
script saved (figures) into the folder. Prose may hold ``{{ expression }}``, which is computed from what the
script has computed so far: no figure in a tutorial is written by hand.
"""

import os
import re
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path

import jupytext

_COMPUTED = re.compile(r"\{\{(.+?)\}\}", re.DOTALL)


def render(script: Path, folder: Path) -> Path:
    """Runs ``script`` in ``folder`` and writes its Markdown there; an error in a cell is raised."""
    text = script.read_text()
    cells = jupytext.reads(text, fmt="py:percent").cells
    main = _become_main(script)
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    parts: list[str] = []
    for cell in cells:
        if cell.cell_type == "markdown":
            parts.append(_COMPUTED.sub(lambda found: str(eval(found[1].strip(), main)), cell.source))
            continue
        lines_before = text[: text.index(cell.source)].count("\n")  # for tracebacks
        code = compile("\n" * lines_before + cell.source, str(script), "exec")
        printed = _printed_by(lambda code=code: exec(code, main))  # type: ignore[misc]
        parts.append(f"```python\n{cell.source.strip()}\n```")
        if printed.strip():
            parts.append(f"```text\n{printed.rstrip()}\n```")
    page = folder / f"{script.stem}.md"
    page.write_text("\n\n".join(parts) + "\n")
    return page


def _become_main(script: Path) -> dict[str, object]:
    """Make a fresh ``__main__``, in which processes that the script spawns find its functions."""
    main = types.ModuleType("__main__")
    main.__file__ = str(script)
    main.__spec__ = None
    sys.modules["__main__"] = main
    sys.path.insert(0, str(script.parent))
    return main.__dict__


def _printed_by(run: Callable[[], object]) -> str:
    """Return the standard output of ``run`` and of the processes that it starts."""
    sys.stdout.flush()
    with tempfile.TemporaryFile("w+") as file:
        terminal = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            run()
        finally:
            sys.stdout.flush()
            os.dup2(terminal, 1)
            os.close(terminal)
        file.seek(0)
        return file.read()


if __name__ == "__main__":
    render(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
