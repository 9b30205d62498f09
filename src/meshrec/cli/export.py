"""``meshrec export``: a run's model as a package that answers requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from meshrec.cli.arguments import parse
from meshrec.export.runs import export_run
from meshrec.planner.text import size_text
from meshrec.train.run_folder import RUNS, find_run


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Writes a package: the model compiled for this machine, its weights in one file that is mapped, and what
    a request must have. It is read by meshrec.export.Predictor, and by C++ without Python (csrc/runtime)."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run, by name or folder: the weights that it reports."""
    out: Path
    """The package's folder, which must not be there yet."""
    step: int | None = None
    """The checkpoint of that step instead."""
    last: bool = False
    """The last step instead."""
    runs: Path = RUNS
    """Where run folders are."""
    compile: bool = True
    """Compile the program; otherwise Python serves it, slower."""


def main(arguments: Sequence[str]) -> int:
    """Parses and does it; the exit code."""
    options = parse(ExportOptions, arguments, program="meshrec export")
    run = find_run(options.run, options.runs)
    folder = export_run(run, options.out, step=options.step, last=options.last, compile=options.compile)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"the package: {folder} ({size_text(size)})")
    print(f"from Python: meshrec.export.Predictor({str(folder)!r}); from C++: see csrc/runtime/predictor.h")
    return 0
