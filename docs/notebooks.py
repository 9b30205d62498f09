"""Notebooks of the tutorials.

``python docs/notebooks.py`` makes ``examples/notebooks/`` of the scripts in percent format.
``python docs/notebooks.py SCRIPT FOLDER`` runs the notebook of one script in a Jupyter kernel, and writes it
with its outputs into the folder, as a notebook and as a page in Markdown: no figure of a tutorial is written
by hand.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = EXAMPLES / "notebooks"
_CELL = re.compile(r"^# %%(.*?)\n(.*?)(?=^# %%|\Z)", re.MULTILINE | re.DOTALL)
_COMPUTED = re.compile(r"\{\{(.+?)\}\}", re.DOTALL)

_INSTALL = """\
# Where it is not installed, as on Colab. From a clone of the repository: %pip install CLONE
try:
    import meshrec
except ModuleNotFoundError:
    %pip install --quiet "meshrec[cli,data,serve,train]\""""
# Python's spawn imports the file of the main program in the processes that it starts.
_FILE = """\
# Processes that a cell starts find the notebook's functions in a file, which has the cells that have run.
import tempfile
from pathlib import Path

import __main__

cells = Path(tempfile.mkdtemp()) / "cells.py"
__main__.__file__ = str(cells)


def keep(cell):
    with cells.open("a") as file:
        file.write(f"{cell.raw_cell}\\n\\n")


get_ipython().events.register("pre_run_cell", keep)"""


_PROSE = '''\
if __name__ == "__main__":
    from IPython.display import Markdown, display

    display(Markdown("""
{text}
""".format(
{figures}    )))
'''


def scripts() -> list[Path]:
    """Return the scripts of the tutorials, in order."""
    return sorted(EXAMPLES.glob("[0-9]_*.py"))


def notebook(script: Path) -> str:
    """Return the notebook of a script, as JSON."""
    text = script.read_text()
    title, *others = [_cell(*part) for part in _CELL.findall(text)]
    added = [_code(_INSTALL), *([_code(_FILE)] if "RankPool" in text or "multiprocessing" in text else [])]
    cells = [{"id": f"cell-{number}", **cell} for number, cell in enumerate([title, *added, *others])]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def run(script: Path, folder: Path) -> None:
    """Run the notebook of a script in a new kernel and write it and its page; a cell's error is raised."""
    import nbclient
    import nbformat

    executed = nbformat.reads(notebook(script), as_version=4)
    folder.mkdir(parents=True, exist_ok=True)
    nbclient.NotebookClient(executed, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    nbformat.write(executed, folder / f"{script.stem}.ipynb")
    (folder / f"{script.stem}.md").write_text(page(executed["cells"]))


def page(cells: Iterable[Mapping[str, Any]]) -> str:
    """Return an executed notebook in Markdown, without the cells that only a notebook needs."""
    parts: list[str] = []
    for cell in cells:
        if cell["source"] in (_INSTALL, _FILE):
            continue
        if cell["cell_type"] == "markdown":
            parts.append(cell["source"])
            continue
        outputs = cell["outputs"]
        if cell["metadata"].get("jupyter", {}).get("source_hidden"):  # prose with figures
            parts += [output["data"]["text/markdown"] for output in outputs if "data" in output]
            continue
        parts.append(f"```python\n{cell['source']}\n```")
        printed = "".join(output["text"] for output in outputs if output.get("name") == "stdout")
        if printed.strip():
            parts.append(f"```text\n{printed.rstrip()}\n```")
    return re.sub(r"\((\d_\w+)\.ipynb\)", r"(\1.md)", "\n\n".join(map(str.strip, parts))) + "\n"


def _cell(kind: str, source: str) -> dict[str, Any]:
    if kind.strip() != "[markdown]":
        return _code(source)
    prose = "\n".join(re.sub("^# ?", "", line) for line in source.strip().splitlines())
    prose = re.sub(r"\((\d_\w+)\.md\)", r"(\1.ipynb)", prose)
    if not _COMPUTED.search(prose):
        return {"cell_type": "markdown", "metadata": {}, "source": prose.splitlines(keepends=True)}
    # Prose with figures is a cell that computes them, with its code folded.
    pieces = _COMPUTED.split(prose.replace("\\", "\\\\"))
    text = "{}".join(re.sub(r"([{}])", r"\1\1", piece) for piece in pieces[::2])
    figures = "".join(f"        {' '.join(piece.split())},\n" for piece in pieces[1::2])
    cell = _code(_PROSE.format(text=text, figures=figures))
    cell["metadata"] = {"cellView": "form", "jupyter": {"source_hidden": True}}
    return cell


def _code(source: str) -> dict[str, Any]:
    lines = source.strip().splitlines(keepends=True)
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": lines}


if __name__ == "__main__":
    if len(sys.argv) == 3:
        run(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
    else:
        NOTEBOOKS.mkdir(exist_ok=True)
        for script in scripts():
            (NOTEBOOKS / f"{script.stem}.ipynb").write_text(notebook(script))
