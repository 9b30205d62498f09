import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshrec.__main__ import main


def test_the_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "meshrec", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    for command in ("train", "runs", "plan", "calibrate"):
        assert command in done.stdout


def test_a_missing_package_is_one_line(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "meshrec.cli.__main__", raising=False)
    monkeypatch.delitem(sys.modules, "meshrec.cli.runs", raising=False)
    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.setattr(sys, "argv", ["meshrec", "runs"])
    assert main() == 1
    assert capsys.readouterr().err == (
        "meshrec: the command line needs the package 'tyro': pip install \"meshrec[cli,train]\"\n"
    )


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [
        ("--version", ""),
        ("cli --version", "1"),
        ("--version", "1"),
        ("runs --help", ""),
        (f"plan {Path(__file__).parent}/train/small.py:small --ranks 2", "1"),
        ("launch slurm RECIPE --dry-run", ""),
    ],
)
def test_a_command_whose_output_nobody_reads_ends_quietly(words, unbuffered):
    reads, writes = os.pipe()
    os.close(reads)
    package, *arguments = words.split() if words.startswith("cli ") else ("", *words.split())
    done = subprocess.run(
        [sys.executable, "-m", f"meshrec.{package}".rstrip("."), *arguments],
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=writes,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writes)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_what_is_registered_for_the_exit_runs():
    code = (
        "import atexit, sys, threading, time; from meshrec.__main__ import command;"
        "sys.argv = ['meshrec', '--version']; atexit.register(print, 'registered');"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('of a thread'))).start(); command()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ["of a thread", "registered"]


def test_an_interrupt_while_modules_are_imported_is_not_swallowed(tmp_path):
    (tmp_path / "greedy.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    for _ in range(10**8):\n        pass\n"
        "except BaseException:\n    pass\n"
    )
    code = (  # the first line undoes what a process that ignores interrupts leaves to its children
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import meshrec.__main__ as command\n"
        "command.main = lambda: __import__('greedy') and 0\ncommand.command()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (130, "meshrec: stopped\n")
