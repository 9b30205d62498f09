"""What the documentation generates from the source."""

import dataclasses
import importlib.util
import json
import re
import sys
import types
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshrec.train import Trainer, join
from meshrec.train.observers import Finished

DOCS = Path(__file__).parent.parent / "docs"


def load(name):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


errors, command_line, notebooks = load("errors"), load("command_line"), load("notebooks")


def test_the_recipe_of_the_training_page_trains(tmp_path):
    text = (DOCS / "rooms" / "train.md").read_text()
    code, watching, in_a_program = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    module = types.ModuleType("page")
    sys.modules["page"] = module
    exec(code, vars(module))
    numbers = np.arange(1000)
    clicks = {"clicked": numbers % 2, "user": [f"u{n % 50}" for n in numbers], "item": numbers % 80}
    path = tmp_path / "clicks.parquet"
    pq.write_table(pa.table(clicks | {"price": numbers / 7, "ts": numbers}), path)
    recipe = dataclasses.replace(module.clicks(), data=module.Clicks(path=path))
    trainer = Trainer(recipe, recipe.data.load(), join("cpu"))
    assert trainer.run()["auc"] > 0.5
    assert trainer.test
    compile(in_a_program, "train.md", "exec")
    exec(watching, vars(module))
    assert (
        module.observer(types.SimpleNamespace(path=path))(Finished({"state": "finished", "test": {}})) is None
    )


@pytest.mark.parametrize("page", sorted((DOCS / "rooms").glob("*.md")), ids=lambda page: page.stem)
def test_every_room_says_what_it_is_for_how_it_works_and_how_to_extend_it(page):
    parts = [line[3:] for line in page.read_text().splitlines() if line.startswith("## ")]
    asked = ["What it is for", "How data goes through it", "How to extend it"]
    assert [part for part in parts if part in asked] == asked


def test_every_error_says_what_to_do():
    silent = [f"{m.room}: {m.text}" for m in errors.messages() if not errors.next_step(m)]
    assert not silent, "\n".join(silent)


def test_messages_are_read_from_the_source(tmp_path):
    (tmp_path / "room.py").write_text(
        'raise ValueError(f"table {table.name!r}: {num_rows(x)} rows, " f"{a + b} asked. Ask for fewer.")\n'
        "raise ValueError(message(x))\nraise\n"
    )
    assert list(errors.messages(tmp_path)) == [
        errors.Message(
            "room.py"[:-3], "ValueError", "table {table.name}: {x} rows, {...} asked. Ask for fewer."
        )
    ]


@pytest.mark.parametrize(
    ("text", "what", "next_step"),
    [
        ("{n} is odd. Add 1.", "{n} is odd.", "Add 1."),
        ("{n} is odd; it must be even", "{n} is odd", "it must be even"),
        ("n must be even, got {n}.", "n must be even, got {n}.", "n must be even"),
        ("0.5 is odd", "0.5 is odd", ""),
    ],
)
def test_a_message_falls_in_two(text, what, next_step):
    assert errors.split(text) == (what, next_step)


def test_commands_of_a_help_text():
    assert command_line.commands("usage: meshrec [-h] {plan,train}\n") == ["plan", "train"]
    assert command_line.commands("usage: meshrec plan [-h] [{None}|PATH]") == []


@pytest.mark.parametrize("script", notebooks.scripts(), ids=lambda path: path.stem)
def test_notebooks_are_those_of_the_scripts(script):
    committed = notebooks.NOTEBOOKS / f"{script.stem}.ipynb"
    assert committed.read_text() == notebooks.notebook(script), "run `make notebooks`"


def test_prose_with_figures_is_a_cell_that_computes_them(tmp_path):
    script = tmp_path / "1_first.py"
    script.write_text(
        "# %% [markdown]\n# # Title\n# %%\nrows = [3]\n# %% [markdown]\n# {{ rows[0] }} in {a}\n"
    )
    title, install, code, prose = json.loads(notebooks.notebook(script))["cells"]
    assert (title["cell_type"], title["source"]) == ("markdown", ["# Title"])
    assert "%pip install" in "".join(install["source"])
    assert code["source"] == ["rows = [3]"]
    shown = []
    display = types.SimpleNamespace(Markdown=str, display=shown.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
        patch.setitem(sys.modules, "IPython.display", display)
        exec("".join(prose["source"]), {"rows": [3], "__name__": "__main__"})
    assert shown == ["\n3 in {a}\n"]
