"""The programs of a package: compiled ones, and exported ones, which are read without loading a pickle.

This does not make them safe to read. A compiled program is a library, and ``torch.export.load`` evaluates
expressions in an exported program. Both can execute code: see "Packages" in docs/guides/security.md.
"""

import contextlib
import hashlib
import importlib
import json
import re
import shutil
import threading
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

from meshrec.lazy import uncollected
from meshrec.ops import library

_EXTRACTED = re.compile(r" (/.*/aotinductor_\w+)/(?:program|shared)/data/aotinductor/model/")
_loading = threading.Lock()
_READERS = ("torch.export.pt2_archive._package", "torch._export.serde.serialize", "torch.export._trace")
"""The modules that torch imports when it reads an exported program."""


class PackageError(RuntimeError):
    """A package cannot be used: it is damaged, unfinished, or made for something else."""


def load_compiled(path: Path) -> Any:
    """Load a program that AOTInductor compiled; only from a package that you trust, since it executes code.

    torch extracts the library into a folder for temporary files, which a process that gets SIGKILL would
    leave there. The folder is removed as soon as the library is loaded, which keeps the library in memory.
    """
    with _loading:
        before = _extracted()
        # Not torch._inductor.aoti_load_package: that imports the compiler, which takes seconds.
        loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
        for folder in _extracted() - before:
            shutil.rmtree(folder, ignore_errors=True)
    return loader


def load_exported(path: Path) -> "torch.export.ExportedProgram":
    """Load a program that `export` saved; only from a package that you trust, since it can execute code.

    Raises:
        PackageError: it holds pickles, calls operators that this version does not have, or was saved by
            another torch.
    """
    try:
        pickles = _pickles(path)
        if pickles:
            raise PackageError(
                f"{path} holds pickles, which are never loaded: {pickles[0]}. Export the model again."
            )
        return torch.export.load(path)
    except PackageError:
        raise
    except Exception as error:
        raise PackageError(
            f"{path} cannot be loaded by this version ({type(error).__name__}: {error}). "
            "Export the model again."
        ) from error


def prepare_for_exported() -> None:
    """Import what `load_exported` would, so that processes forked from this one start without it.

    torch imports its exporter with the first program, which takes over a second.
    """
    with uncollected(), contextlib.suppress(ImportError):  # another torch may have other modules
        for name in _READERS:
            importlib.import_module(name)


def extra_file(path: Path, name: str, most: int) -> bytes | None:
    """Read a file that was saved beside an exported program; return None if the archive has no such file.

    Raises:
        PackageError: for what is not an archive, and a file of more than ``most`` bytes.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            found = [each for each in archive.namelist() if each.endswith(f"/extra/{name}")]
            content = archive.open(found[0]).read(most + 1) if found else None
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, RuntimeError) as error:
        raise PackageError(f"{path} cannot be read ({error}). Export the model again.") from error
    if content is not None and len(content) > most:
        raise PackageError(f"{name} in {path} has more than {most:,} bytes. Export the model again.")
    return content


def _extracted() -> set[str]:
    """Return the folders that this process has loaded compiled programs of packages from, on Linux."""
    found = None
    with contextlib.suppress(OSError):
        found = Path("/proc/self/maps").read_text(errors="surrogateescape")
    return set(_EXTRACTED.findall(found or ""))


def _pickles(path: Path) -> list[str]:
    """List what torch.export.load would unpickle: example inputs, objects, and tensors marked as pickles."""
    found = []
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            folder, _, name = entry.filename.rpartition("/")
            if folder.endswith("data/sample_inputs") and entry.file_size:
                found.append(entry.filename)
            elif folder.endswith(("data/constants", "data/weights")):
                if name.endswith("_config.json"):
                    records = json.loads(archive.read(entry))["config"]
                    found += [each for each, record in records.items() if record["use_pickle"]]
                elif not name.startswith(("tensor_", "weight_")):
                    found.append(entry.filename)
    return found


def isa() -> str:
    """Return the instruction set that a program compiled here may use."""
    return str(torch.backends.cpu.get_cpu_capability())


def operators() -> str:
    """Return a digest of the operators' schemas, which a compiled program depends on."""
    return hashlib.sha256("\n".join(sorted(library.schemas())).encode()).hexdigest()[:16]
