import subprocess
import sys

import pytest

import meshrec
from meshrec.cli.__main__ import main


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "meshrec.cli", *arguments], capture_output=True, text=True)


def test_help_lists_the_commands():
    result = run("--help")
    assert result.returncode == 0
    assert "plan" in result.stdout
    assert "calibrate" in result.stdout


def test_the_version():
    result = run("--version")
    assert result.stdout == f"meshrec {meshrec.__version__}\n"
    assert result.returncode == 0


def test_the_help_waits_for_no_heavy_import():
    code = "import sys; sys.argv = ['meshrec', '--help']; from meshrec.__main__ import main; main()"
    code += "; assert not {'torch', 'numpy', 'pyarrow', 'tyro', 'rich'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_mistakes_end_with_one_line():
    result = run("plan", "nothing.json")
    assert result.returncode == 1
    assert result.stderr.startswith("meshrec: nothing.json is no file in /")


def test_files_that_cannot_be_read_are_named():
    result = run("plan", "--diff", "nothing.json", "nothing.json")
    assert result.returncode == 1
    assert result.stderr == (
        "meshrec: nothing.json: No such file or directory. Look at the path and its permissions.\n"
    )


def test_a_missing_extra_is_told_in_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr(sys, "argv", ["meshrec", "plan", "movielens_dlrm", "--ranks", "2"])
    assert main() == 1
    assert capsys.readouterr().err == 'meshrec: this needs pyarrow: pip install "meshrec[movielens]"\n'


def test_a_module_that_no_extra_installs_is_a_fault(monkeypatch):
    def fail(options):
        raise ModuleNotFoundError("No module named 'ours'", name="ours")

    monkeypatch.setattr("meshrec.cli.plan.run", fail)
    monkeypatch.setattr(sys, "argv", ["meshrec", "plan", "tables.json"])
    with pytest.raises(ModuleNotFoundError, match="ours"):
        main()
