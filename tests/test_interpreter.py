"""Processes that MeshRec starts do not import modules of the current folder."""

import importlib
import os
import subprocess
import sys

import pytest

from meshrec import interpreter
from meshrec.interpreter import drop_current_folder, interpreter_arguments


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A current folder with a ``torch.py`` and a ``multiprocessing.py`` that leave a file when they run."""
    for name in ("torch", "multiprocessing", "socket", "meshrec"):
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'EXECUTED')!r}, 'w').close(); raise ImportError('planted')"
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return tmp_path / "EXECUTED"


def test_a_new_interpreter_imports_nothing_of_the_current_folder(planted):
    code = "import socket, meshrec.interpreter; print(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, *interpreter_arguments(code), "--word"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "['--word']\n"
    assert not planted.exists()


def test_ranks_start_without_folders_that_a_recipe_added(monkeypatch):
    monkeypatch.syspath_prepend("folder of a recipe")
    (_, code) = interpreter_arguments("pass")
    assert "folder of a recipe" not in code
    assert "folder of a recipe" in interpreter_arguments("pass", sys.path)[1]


@pytest.mark.parametrize(
    "command",
    [
        "train synthetic_clicks",
        "tune synthetic_clicks",
        "evaluate x --data y",
        "predict x --data y --out scores.parquet",
    ],
)
def test_ranks_are_started_by_the_safe_interpreter(command, monkeypatch, tmp_path):
    from torch.distributed.launcher import api

    from meshrec.cli.__main__ import COMMANDS
    from meshrec.train.run_folder import CONFIG

    started = []

    class Launched(Exception):
        pass

    def elastic_launch(config, entrypoint):
        def start(*arguments):
            started.append((entrypoint, *arguments))
            raise Launched

        return start

    monkeypatch.setattr(api, "elastic_launch", elastic_launch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / CONFIG).write_text("{}")
    words = [*command.split(), "--nproc", "2", "--runs", str(tmp_path)]
    with pytest.raises(Launched):
        importlib.import_module(COMMANDS[words[0]].module).main(words[1:])
    ((program, option, code, *_),) = started
    assert (program, option) == (sys.executable, "-c")
    assert code.startswith("import sys; sys.path[:] = [")
    assert "''" not in code.split("]")[0]


def test_python_m_forgets_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/elsewhere"])
    monkeypatch.setattr(interpreter, "_start_path", [str(tmp_path), "/elsewhere"])
    drop_current_folder()
    drop_current_folder()
    assert sys.path == interpreter._start_path == ["/elsewhere"]


def test_python_m_imports_nothing_of_the_current_folder(tmp_path):
    for name in ("signal", "threading", "atexit", "json", "torch", "tyro"):
        (tmp_path / f"{name}.py").write_text("open('EXECUTED', 'w').close()")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "meshrec", "--version"], cwd=tmp_path, env=environment, capture_output=True
    )
    assert done.returncode == 0
    assert not (tmp_path / "EXECUTED").exists()


def test_a_server_starts_its_children_safely(planted):
    from meshrec.serve import child

    class Parent:
        @staticmethod
        def fileno():
            return 0

    spawned = []

    def spawn(program, arguments, environment, **options):
        spawned.append(arguments)
        return 0

    original, os.posix_spawn = os.posix_spawn, spawn
    try:
        child._start_interpreter(Parent())
    finally:
        os.posix_spawn = original
    ((_, option, code),) = spawned
    assert option == "-c"
    assert code.startswith("import sys; sys.path[:] = ")


def test_a_rank_pool_imports_nothing_of_the_current_folder(planted, tmp_path):
    """Its server is a process of its own, which a pool of another test may have started: so is this one."""
    script = tmp_path / "elsewhere" / "script.py"
    script.parent.mkdir()
    script.write_text(
        "import os\nfrom meshrec.testing import rank_pool\nfrom meshrec.testing.rank_pool import RankPool\n"
        "rank_pool.PRELOADED = ('torch',)\n"
        "def work():\n    return None\n"
        "if __name__ == '__main__':\n"
        "    with RankPool(1) as pool:\n        pool.run(work)\n"
        "    print(os.environ.get('PYTHONSAFEPATH'))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
    assert not planted.exists()
