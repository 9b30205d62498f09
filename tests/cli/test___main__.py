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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.json"], "nothing.json is neither a file in "),
        (
            ["--diff", "nothing.json", "nothing.json"],
            "nothing.json: No such file or directory. Look at the path and its permissions.\n",
        ),
    ],
)
def test_mistakes_end_with_one_line(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["meshrec", "plan", *arguments])
    assert main() == 1
    found = capsys.readouterr().err
    assert found.startswith(f"meshrec: {message}")
    assert found.count("\n") == 1


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


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "Python could not allocate memory"),
        (RuntimeError("std::bad_alloc"), "std::bad_alloc"),
        (RuntimeError("x DefaultCPUAllocator: can't allocate memory: 8 bytes\nframe"), "8 bytes"),
    ],
)
def test_missing_memory_is_told_in_one_line(monkeypatch, capsys, error, reason):
    def fail(options):
        raise error

    monkeypatch.setattr("meshrec.cli.plan.run", fail)
    monkeypatch.setattr(sys, "argv", ["meshrec", "plan", "tables.json"])
    assert main() == 1
    output = capsys.readouterr().err
    assert output.startswith("meshrec: there is not enough memory")
    assert reason in output
    assert output.count("\n") == 1


def test_a_fault_is_not_told_as_missing_memory(monkeypatch):
    def fail(options):
        raise RuntimeError("a fault")

    monkeypatch.setattr("meshrec.cli.plan.run", fail)
    monkeypatch.setattr(sys, "argv", ["meshrec", "plan", "tables.json"])
    with pytest.raises(RuntimeError, match="a fault"):
        main()
