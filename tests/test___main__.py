import subprocess
import sys


def test_the_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "meshrec", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    for command in ("train", "runs", "plan", "calibrate"):
        assert command in done.stdout
