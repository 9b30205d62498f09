"""Processes that MeshRec starts do not import modules of the current folder."""

import os
import subprocess
import sys

import pytest

from meshrec import interpreter
from meshrec.interpreter import START_PATH, drop_current_folder, interpreter_arguments
from meshrec.train.rank_processes import RankProcesses


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
        [sys.executable, *interpreter_arguments(code, START_PATH), "--word"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "['--word']\n"
    assert not planted.exists()


def test_ranks_import_nothing_of_the_current_folder(planted, tmp_path):
    """Nor does the fork server that they start from, with which a pool of ranks starts, too."""
    script = tmp_path / "elsewhere" / "script.py"
    script.parent.mkdir()
    script.write_text(
        "import os\nfrom meshrec.train.rank_processes import RankProcesses\n"
        "if __name__ == '__main__':\n"
        "    ranks = RankProcesses(['--version'], os.environ, 2)\n"
        "    while ranks.running():\n        ranks.wait(60.0)\n"
        "    assert ranks.failures() == {}\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("meshrec ") == 2
    assert not planted.exists()


def test_ranks_run_a_command_with_the_path_at_the_start(monkeypatch, capfd):
    monkeypatch.syspath_prepend("folder of a recipe")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    ranks = RankProcesses(["--version"], os.environ, 2)
    while ranks.running():
        ranks.wait(60.0)
    assert (ranks.failures(), capfd.readouterr().out.count("meshrec ")) == ({}, 2)


def test_python_m_forgets_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/elsewhere"])
    monkeypatch.setattr(interpreter, "START_PATH", [str(tmp_path), "/elsewhere"])
    drop_current_folder()
    drop_current_folder()
    assert sys.path == interpreter.START_PATH == ["/elsewhere"]


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
