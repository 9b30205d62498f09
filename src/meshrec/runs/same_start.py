"""Check before training that all ranks have the same recipe, options, data, source code and versions.

Ranks with different settings would train without an error, for example with different learning rates for
different table shards. They are therefore compared when they join, and again after loading the data.
"""

import dataclasses
import hashlib
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from meshrec.data.locations import is_address
from meshrec.ops import library
from meshrec.ops.library import has_kernels, library_path
from meshrec.runs.saved_recipe import describe_data
from meshrec.runs.source import source_digests
from meshrec.train.ranks import Ranks
from meshrec.train.recipe import DataSource, Recipe
from meshrec.train.run_folder import flatten, to_json

if TYPE_CHECKING:
    from meshrec.data import Dataset, Reader

ENVIRONMENT = (
    "CUBLAS_WORKSPACE_CONFIG",
    "MESHREC_ISA",
    "MKL_CBWR",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TRITON_INTERPRET",
)
"""Environment variables that affect a step's results. MESHREC_HOST_LINK may differ between ranks, because it
does not change any bit.
"""
# A fingerprint covers 9 parts of 64 KiB per file, so a file of up to half a MiB is read completely.
_FINGERPRINT_BYTES = 1 << 16
_FINGERPRINT_PARTS = 9
# Files per folder to compare.
_MAX_FILES = 1000
# Differences listed in an error.
_MAX_NAMED = 5
# Files in a data folder which are compared. Others, such as logs, may differ between hosts.
_DATA_SUFFIXES = (".parquet", ".csv", ".tsv", ".dat", ".txt", ".json", ".npy", ".gz", ".bz2", ".zst")
# Object addresses in reprs differ between processes.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def compare_ranks(ranks: Ranks, mine: Mapping[str, Any], complaint: str) -> None:
    """Check that values are equal on all ranks. Collective.

    Args:
        ranks: the ranks, from `join`.
        mine: this rank's values, by name. Values are compared by ``repr``.
        complaint: end of the error's sentence "the ranks ...", such as "were not started alike".

    Raises:
        ValueError: values differ. Raised on every rank, with value names and ranks.
    """
    words = {name: repr(value) for name, value in mine.items()}
    # Exchange digests first. Usually they agree, and a single small exchange suffices.
    digest = hashlib.sha256(repr(sorted(words.items())).encode()).hexdigest()
    if len(set(ranks.collect(digest))) == 1:
        return
    # Exchange all values only if something differs, to name the differences.
    every: list[dict[str, str]] = ranks.collect(words)
    names = sorted({name for values in every for name in values})
    differing = [name for name in names if len({values.get(name) for values in every}) > 1]
    differences = [
        f"{name} is {_format_by_rank([values.get(name, 'absent') for values in every])}" for name in differing
    ]
    more = f"; and {len(differences) - _MAX_NAMED} more" if len(differences) > _MAX_NAMED else ""
    raise ValueError(
        f"the ranks {complaint}: {'; '.join(differences[:_MAX_NAMED])}{more}. Start all ranks with the same "
        "command, the same files, and the same versions."
    )


def describe_start(
    recipe: Recipe, source: str | None, options: Mapping[str, Any], *, files: bool = True
) -> dict[str, Any]:
    """Return everything that must be equal on all ranks when a run starts, for `compare_ranks`.

    Args:
        recipe: the recipe to train.
        source: recipe name or file, as given to `resolve`.
        options: command-line options, which must be equal on all ranks.
        files: whether the ranks read the recipe's data files, which must then be equal.

    Returns:
        Plain values by name. They are recipe options, data files, options, versions, environment variables,
        source digests and a digest of the sharding plan.
    """
    paths = dict(_data_paths(recipe.data, "data")) if files else {}
    description: dict[str, Any] = {
        name: _ADDRESS.sub("", str(value)) for name, value in flatten(to_json(recipe))
    }
    for name, path in paths.items():
        if isinstance(path, Path) or os.path.isabs(path):
            description.pop(name, None)  # the same data may lie elsewhere on each machine
        description |= {f"{name}: {file}": about for file, about in _list_data_files(Path(path))}
    description |= {f"option {name}": value for name, value in options.items()}
    description |= {f"version of {name}": value for name, value in versions().items()}
    description |= {f"variable {name}": os.environ.get(name) for name in ENVIRONMENT}
    description |= {f"source {name}": digest[:16] for name, digest in source_digests(source).items()}
    plan = recipe.placement.plan
    if plan is not None:
        description["placement.plan"] = _fingerprint(plan)
    return description


def file_fingerprints(source: DataSource) -> dict[str, str]:
    """Return a fingerprint for every file in a data source, by option name and file name."""
    return {
        f"{name}: {file}": about
        for name, path in _data_paths(source, "data")
        for file, about in _list_data_files(Path(path))
    }


def describe_dataset(dataset: "Dataset") -> dict[str, Any]:
    """Return the sizes and files of the data loaded on this rank, for `compare_ranks`."""
    description = dict(flatten(describe_data(dataset), "data"))
    for name, reader in (
        ("train", dataset.train),
        ("validation", dataset.validation),
        ("test", dataset.test),
    ):
        description |= {f"{name} file {number}": about for number, about in _describe_files(reader)}
    return description


def _describe_files(reader: "Reader | None") -> Iterator[tuple[int, str]]:
    """Yield number and description (name, row count, fingerprint) for every file in a reader."""
    for number, file in enumerate([] if reader is None else reader.files):
        about = _fingerprint(file.name) if number < _MAX_FILES else ""
        yield number, f"{Path(file.name).name}, {file.num_rows} rows, {about}"


def _format_by_rank(values: list[str]) -> str:
    """Format the values on all ranks, the most frequent first: ``0.1 on rank 0, 1 and 0.2 on rank 3``."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    parts = [
        f"{value} on rank {', '.join(map(str, of[:8]))}{', ...' if len(of) > 8 else ''}"
        for value, of in sorted(ranks.items(), key=lambda item: (-len(item[1]), item[1]))
    ]
    return " and ".join(parts)


def _data_paths(value: Any, name: str) -> Iterator[tuple[str, str | Path]]:
    """Find the paths of existing files and folders among the options of a data source.

    Lists and nested data sources are searched, too.
    """
    if isinstance(value, str | Path):
        # os.path.exists raises for strings with NUL.
        if value and "\0" not in str(value) and os.path.exists(value):
            yield name, value
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _data_paths(item, f"{name}.{number}")
    elif isinstance(value, DataSource) and dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _data_paths(getattr(value, field.name), f"{name}.{field.name}")


def _list_data_files(path: Path) -> Iterator[tuple[str, str]]:
    """Yield name and fingerprint for a file, or for every data file in a folder."""
    if path.is_dir() and path.resolve() == Path.cwd():
        return  # a default such as Path() means no folder of data; logs that grow may lie here
    files = [path]
    if path.is_dir():
        files = sorted(
            entry for entry in path.iterdir() if entry.suffix in _DATA_SUFFIXES and entry.is_file()
        )
    for file in files[:_MAX_FILES]:
        yield file.name, _fingerprint(file)
    if len(files) > _MAX_FILES:
        yield "number of files", str(len(files))


def _fingerprint(file: str | Path) -> str:
    """Return a fingerprint: the file's size, and a digest of evenly spaced parts.

    Reading whole files would take too long. The fingerprint of a file in a store is its version there. If the
    file does not exist, return a fixed string.
    """
    if is_address(file):
        from meshrec.data.stores import version_of

        return version_of(str(file))
    path = Path(file)
    if not path.is_file():
        return "no file of this machine"
    size = path.stat().st_size
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        for number in range(_FINGERPRINT_PARTS):
            # Parts are spread evenly from the start to the end of the file.
            stream.seek(max(0, size - _FINGERPRINT_BYTES) * number // (_FINGERPRINT_PARTS - 1))
            digest.update(stream.read(_FINGERPRINT_BYTES))
    return f"{size} bytes {digest.hexdigest()[:16]}"


@cache
def versions() -> dict[str, str]:
    """Return the versions for all software that affects the results of a step, by name.

    The entry for MeshRec also has a digest of the names and sizes of the source files, because unreleased
    versions have the same version number.
    """
    root = Path(library.__file__).parents[1]
    sources = sorted(f"{path.relative_to(root)} {path.stat().st_size}" for path in root.rglob("*.py"))
    try:
        release = importlib.metadata.version("meshrec")
    except importlib.metadata.PackageNotFoundError:  # from a folder of sources
        release = "not installed"
    kernels = "none"
    if has_kernels:
        kernels = hashlib.sha256(Path(library_path()).read_bytes()).hexdigest()[:16]
    return {
        "meshrec": f"{release} {hashlib.sha256(repr(sources).encode()).hexdigest()[:8]}",
        "kernels": kernels,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
    }
