"""Load package programs: compiled programs, and exported programs without pickles.

Loading executes code: a compiled program is a shared library, and ``torch.export.load`` evaluates expressions
in an exported program. Load only trusted packages; see "Packages" in docs/guides/security.md.
"""

import contextlib
import hashlib
import importlib
import json
import os
import re
import threading
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

from meshrec.durable import CreatedPath
from meshrec.lazy import without_gc
from meshrec.ops import library

# Matches lines in /proc/self/maps. Group 1 is the temporary folder to which torch extracted the library.
_EXTRACTED = re.compile(r" (/.*/aotinductor_\w+)/(?:program|shared)/data/aotinductor/model/")
# Held while a program is loaded, because torch's extracted folder is found by comparing folders before and
# after.
_loading = threading.Lock()
# Modules imported by torch to load an exported program.
_READERS = ("torch.export.pt2_archive._package", "torch._export.serde.serialize", "torch.export._trace")


class PackageError(RuntimeError):
    """A package is damaged, incomplete, not signed as required, or needs another version."""


def load_compiled(path: Path) -> Any:
    """Load a program compiled by AOTInductor. This executes code, so load only trusted packages.

    Returns:
        torch's loader. Its ``boxed_run`` takes a flat list with all input tensors, and returns a list with
        the outputs.
    """
    # torch extracts the library to a temporary folder, and removes it when the process ends, unless it is
    # killed. Remove it at once: the library is in memory.
    with _loading:
        parent = Path(os.environ.get("TMPDIR", "/tmp"))
        # Only a folder that did not exist before is removed, so those of other processes stay.
        before = _extracted_folders() | {str(path) for path in parent.iterdir()}
        # torch._inductor.aoti_load_package would import the compiler, which takes seconds.
        # The other arguments: model name, several threads allowed, a single runner, no device index.
        loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
        for folder in _extracted_folders() - before:
            CreatedPath.at(Path(folder)).remove_tree()
    return loader


def load_exported(path: Path) -> "torch.export.ExportedProgram":
    """Load a program written by ``torch.export.save``. This can execute code, so load only trusted packages.

    Raises:
        PackageError: the program contains pickles, calls operators unknown here, or was saved by an
            incompatible torch version.
    """
    try:
        pickles = _find_pickles(path)
        if pickles:
            raise PackageError(
                f"{path} contains pickles, which are never loaded: {pickles[0]}. Export the model again."
            )
        # Only after this check, because torch.export.load unpickles such entries.
        with warnings.catch_warnings():
            # torch 2.10 warns that it maps constants without write access.
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            return torch.export.load(path)
    except PackageError:
        raise
    except Exception as error:
        raise PackageError(
            f"{path} cannot be loaded by this version ({type(error).__name__}: {error}). "
            "Export the model again."
        ) from error


def import_readers() -> None:
    """Import the torch modules needed by `load_exported`. Call this function before forking.

    Otherwise, every process imports them with its first program, which takes more than a second.
    """
    with without_gc(), contextlib.suppress(ImportError):  # module names differ between torch versions
        for name in _READERS:
            importlib.import_module(name)


def extra_file(path: Path, name: str, most: int) -> bytes | None:
    """Read an extra file from the archive of an exported program (see ``extra_files`` in
    ``torch.export.save``).

    Args:
        path: archive, such as ``exported.pt2`` in a package.
        name: name under which the extra file was saved.
        most: maximum size in bytes.

    Returns:
        File content, or None if the archive has no such file.

    Raises:
        PackageError: not an archive, or a file larger than ``most`` bytes.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.namelist() if entry.endswith(f"/extra/{name}")]
            # One byte above the limit shows that the entry is too long, however large it says it is.
            content = archive.open(entries[0]).read(most + 1) if entries else None
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, RuntimeError) as error:
        raise PackageError(f"{path} cannot be read ({error}). Export the model again.") from error
    if content is not None and len(content) > most:
        raise PackageError(f"{name} in {path} has more than {most:,} bytes. Export the model again.")
    return content


def _extracted_folders() -> set[str]:
    """Return the temporary folders from which this process has mapped compiled programs; Linux only."""
    maps = None
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text(errors="surrogateescape")
    return set(_EXTRACTED.findall(maps or ""))


def _find_pickles(path: Path) -> list[str]:
    """Return the archive entries that torch.export.load would unpickle.

    These are example inputs, non-tensor constants, and tensors marked as pickled.
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
                # Files with other names hold non-tensor constants.
                elif not name.startswith(("tensor_", "weight_")):
                    pickles.append(entry.filename)
    return pickles


def isa() -> str:
    """Return the CPU instruction set for which programs are compiled on this machine, such as "AVX512"."""
    return str(torch.backends.cpu.get_cpu_capability())


def operators() -> str:
    """Return a digest of MeshRec's operator schemas.

    A compiled program calls these operators by their schemas, so it can run only where the digest is the
    same.
    """
    return hashlib.sha256("\n".join(sorted(library.schemas())).encode()).hexdigest()[:16]
