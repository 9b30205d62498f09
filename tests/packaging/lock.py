"""Prints `constraints.txt` for `make lock`: the versions of everything that the given Pythons have.

Where two environments have different versions, both were tested, and the line allows what lies between.
"""

import json
import re
import subprocess
import sys

LIST = (
    "import importlib.metadata as m, json; print(json.dumps(["
    "(d.metadata['Name'], d.version, d.metadata['Requires-Python'] or '') for d in m.distributions()]))"
)
HEAD = """\
# Every package of the tested environments, with all extras, as `make lock` writes it. A range names two
# tested versions: mlflow holds some packages back.
# Not listed: pip, and triton with NVIDIA's packages, since each torch for CUDA pins its own.
"""
COMMENTS = {
    "torch": "The only line about torch: another one is installed with this line left out.",
    "tyro": "Mistakes in arguments are told by a hook of tyro's that is not public: on_parse_error.",
}
UNLISTED = {"pip", "meshrec", "triton"}


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def order(version):
    return [int(part) if part.isdigit() else -1 for part in re.split(r"[.+]", version)]


def first_python(requires):
    """Return the first Python from 3.10 on that ``Requires-Python`` allows, as far as it sets a floor."""
    floors = [int(minor) for minor in re.findall(r">=?\s*3\.(\d+)", requires)]
    return max([10, *floors])


def lines_of(environments):
    """Return a line for each package, from lists of name, version and Requires-Python."""
    versions, pythons = {}, {}
    for environment in environments:
        for name, version, requires in environment:
            name = normal(name)
            if name not in UNLISTED and not name.startswith("nvidia-"):
                versions.setdefault(name, set()).add(version.split("+")[0])  # 2.13.0+cpu is 2.13.0 elsewhere
                pythons[name] = max(pythons.get(name, 10), first_python(requires))
    lines = []
    for name, tested in sorted(versions.items()):
        low, high = min(tested, key=order), max(tested, key=order)
        pin = f"{name}=={low}" if low == high else f"{name}>={low},<={high}"
        if pythons[name] > 10:
            pin += f'; python_version >= "3.{pythons[name]}"'
        lines += [*([f"# {COMMENTS[name]}"] if name in COMMENTS else []), pin]
    return lines


if __name__ == "__main__":
    listed = [json.loads(subprocess.check_output([python, "-c", LIST])) for python in sys.argv[1:]]
    print(HEAD + "\n".join(lines_of(listed)))
