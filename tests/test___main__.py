import subprocess
import sys

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


def test_what_is_registered_for_the_exit_runs():
    code = (
        "import atexit, sys, threading, time; from meshrec.__main__ import command;"
        "sys.argv = ['meshrec', '--version']; atexit.register(print, 'registered');"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('of a thread'))).start(); command()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ["of a thread", "registered"]
