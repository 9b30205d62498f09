"""Writes the page of the command line: what every command says to ``--help``."""

import os
import re
import subprocess
import sys
from pathlib import Path


def help_of(*command: str) -> str:
    """Return the output of ``meshrec COMMAND --help``, 100 columns wide and without colours."""
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    call = [sys.executable, "-m", "meshrec.cli", *command, "--help"]
    printed = subprocess.run(call, env=environment, capture_output=True, text=True, check=True).stdout
    return re.sub(r"\x1b\[[0-9;]*m", "", printed).rstrip()


def commands(text: str) -> list[str]:
    """Return the names of the commands that a help text lists: ``usage: ... {plan,train}``."""
    found = re.search(r"\{([a-z][a-z,\-\s]*)\}", text.split("\n\n")[0])
    return [] if found is None else [name.strip() for name in found[1].split(",")]


def pages(*command: str) -> list[str]:
    """Return the help of a command and of all commands below it."""
    text = help_of(*command)
    title = "## `" + " ".join(("meshrec", *command)) + "`"
    below = [page for name in commands(text) for page in pages(*command, name)]
    return [f"{title}\n\n```text\n{text}\n```", *below]


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n\n".join(pages()) + "\n")
