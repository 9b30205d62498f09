"""Programs of a package: compiled ones, and exported ones, which are read without unpickling.

Reading them is still not safe. A compiled program is a shared library, and ``torch.export.load`` evaluates
expressions in an exported program. Both can execute code: see "Packages" in docs/guides/security.md.
"""

import contextlib
import hashlib
import importlib
import json
import os
import re
import threading
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

from meshrec.durable import Created
from meshrec.lazy import without_gc
from meshrec.ops import library

_EXTRACTED = re.compile(r" (/.*/aotinductor_\w+)/(?:program|shared)/data/aotinductor/model/")
# Held while loading: the extracted folder is identified by comparing before and after.
_loading = threading.Lock()
_READERS = ("torch.export.pt2_archive._package", "torch._export.serde.serialize", "torch.export._trace")
"""Modules which torch imports to read an exported program."""


class PackageError(RuntimeError):
    """A package is damaged, incomplete, or made for another environment."""


def load_compiled(path: Path) -> Any:
    """Load a program compiled by AOTInductor. It executes code, so only load trusted packages.

    torch extracts the library to a temporary folder, which a process killed by SIGKILL would leave behind.
    The folder is removed once the library is loaded; the loaded library stays in memory.
    """
    with _loading:
        parent = Path(os.environ.get("TMPDIR", "/tmp"))
        before = _extracted() | {str(path) for path in parent.iterdir()}
        # torch._inductor.aoti_load_package would import the compiler, which takes seconds.
        loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
        for folder in _extracted() - before:
            Created.at(Path(folder)).remove_tree()
    return loader


def load_exported(path: Path) -> "torch.export.ExportedProgram":
    """Load an exported program. It can execute code, so only load trusted packages.

    Raises:
        PackageError: the program has pickles, calls unknown operators, or was saved by another torch version.
    """
    try:
        pickles = _pickles(path)
        if pickles:
            raise PackageError(
                f"{path} contains pickles, which are never loaded: {pickles[0]}. Export the model again."
            )
        return torch.export.load(path)
    except PackageError:
        raise
    except Exception as error:
        raise PackageError(
            f"{path} cannot be loaded by this version ({type(error).__name__}: {error}). "
            "Export the model again."
        ) from error


def import_readers() -> None:
    """Import the torch modules which `load_exported` needs. Call before forking.

    Otherwise torch imports them when it loads the first program, which takes over a second per process.
    """
    with without_gc(), contextlib.suppress(ImportError):  # module names differ between torch versions
        for name in _READERS:
            importlib.import_module(name)


def extra_file(path: Path, name: str, most: int) -> bytes | None:
    """Read a file stored next to an exported program.

    Args:
        path: program archive.
        name: file name.
        most: maximum size in bytes.

    Returns:
        Content; None if the archive has no such file.

    Raises:
        PackageError: not an archive, or a file of more than ``most`` bytes.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.namelist() if entry.endswith(f"/extra/{name}")]
            content = archive.open(entries[0]).read(most + 1) if entries else None
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, RuntimeError) as error:
        raise PackageError(f"{path} cannot be read ({error}). Export the model again.") from error
    if content is not None and len(content) > most:
        raise PackageError(f"{name} in {path} has more than {most:,} bytes. Export the model again.")
    return content


def _extracted() -> set[str]:
    """Return the folders from which this process has loaded compiled programs (Linux only)."""
    maps = None
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text(errors="surrogateescape")
    return set(_EXTRACTED.findall(maps or ""))


def _pickles(path: Path) -> list[str]:
    """List entries which torch.export.load would unpickle: example inputs, objects, and tensors marked as
    pickles.
    """
    pickles = []
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            folder, _, name = entry.filename.rpartition("/")
            if folder.endswith("data/sample_inputs") and entry.file_size:
                pickles.append(entry.filename)
            elif folder.endswith(("data/constants", "data/weights")):
                if name.endswith("_config.json"):
                    records = json.loads(archive.read(entry))["config"]
                    pickles += [tensor for tensor, record in records.items() if record["use_pickle"]]
                elif not name.startswith(("tensor_", "weight_")):
                    pickles.append(entry.filename)
    return pickles


def isa() -> str:
    """Return the instruction set which programs compiled here may use."""
    return str(torch.backends.cpu.get_cpu_capability())


def operators() -> str:
    """Return a digest of the operator schemas, on which compiled programs depend."""
    return hashlib.sha256("\n".join(sorted(library.schemas())).encode()).hexdigest()[:16]
