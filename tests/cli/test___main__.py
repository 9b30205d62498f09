import subprocess
import sys


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "meshrec.cli", *arguments], capture_output=True, text=True)


def test_help_lists_the_commands():
    result = run("--help")
    assert result.returncode == 0
    assert "plan" in result.stdout
    assert "calibrate" in result.stdout


def test_mistakes_end_with_one_line():
    result = run("plan", "nothing.json")
    assert result.returncode == 1
    assert result.stderr.startswith("meshrec: nothing.json is no file and no recipe; give a task file")


def test_files_that_cannot_be_read_are_named():
    result = run("plan", "--diff", "nothing.json", "nothing.json")
    assert result.returncode == 1
    assert result.stderr == (
        "meshrec: nothing.json: No such file or directory. Look at the path and its permissions.\n"
    )
