"""Locations of data: paths, folders and patterns, on this machine or in a store that pyarrow reaches."""

import fnmatch
import glob
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from meshrec.data.dataset import Paths
from meshrec.data.faults import DataError, needs

T = TypeVar("T")
File = Path | str
"""A file on this machine, or its URI in a store, such as ``s3://bucket/clicks.parquet``."""

_CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}


_PARQUET_OR_CSV = ("*.parquet", " ".join(["*.csv", *(f"*.csv{suffix}" for suffix in _CODECS)]))


def expand(paths: Paths, *patterns: str) -> list[File]:
    """Return the files that paths, folders and patterns stand for; URIs for files in stores.

    A folder stands for its files of the first of ``patterns`` that matches any. An entry of ``patterns`` may
    hold several patterns, separated by blanks.

    Stores are those of ``pyarrow.fs.FileSystem.from_uri``: s3, gs, abfs, hdfs, hf and file. Credentials come
    from where the store's own tools find them.

    Raises:
        DataError: one of the paths matches nothing, or cannot be reached.
    """
    files: list[File] = []
    for each in [paths] if isinstance(paths, str | Path) else paths:
        found = _stored(each, patterns) if is_address(each) else _local(each, patterns)
        if not found:
            place = "" if is_address(each) or Path(each).is_absolute() else f" in {Path.cwd()}"
            searched = " or ".join(patterns)
            raise DataError(
                f"{each} stands for no file{place}. Name files, or a folder, which is searched for "
                f"{searched}."
            )
        files += found
    if not files:
        raise DataError("no paths were given.")
    return files


def expand_tables(paths: Paths) -> tuple[list[File], bool]:
    """Return the Parquet or CSV files that paths, folders and patterns stand for, and whether they are CSV.

    Raises:
        DataError: as for `expand`, or the files are of both kinds.
    """
    files = expand(paths, *_PARQUET_OR_CSV)
    text = [is_csv(each) for each in files]
    if any(text) and not all(text):
        raise DataError(f"{[str(each) for each in files]} are CSV and other files. Give files of one kind.")
    return files, all(text)


def is_address(path: str | Path) -> bool:
    """Return whether a file lies in a store."""
    return isinstance(path, str) and "://" in path


def is_csv(path: str | Path) -> bool:
    """Return whether the name of a file, URI or pattern says that it is CSV, compressed or not."""
    name = str(path).partition("?")[0] if is_address(path) else str(path)
    return name.lower().endswith((".csv", *(f".csv{suffix}" for suffix in _CODECS)))


def codec_of(file: File) -> str | None:
    """Return pyarrow's name of the compression that a file's name implies; None if it implies none."""
    return _CODECS.get(suffix_of(file).lower())


def opened(file: File) -> Any:
    """Open a file for pyarrow. The caller closes it.

    Raises:
        OSError: the file cannot be reached.
    """
    if not is_address(file):
        return Path(file).open("rb")
    filesystem, path = needs("pyarrow.fs", "data").FileSystem.from_uri(str(file))
    return filesystem.open_input_file(path)


def _local(each: str | Path, patterns: Sequence[str]) -> list[File]:
    path = Path(each)
    if path.is_dir():
        return [*_first(sorted(path.iterdir()), lambda file: file.name, patterns)]
    return [path] if path.exists() else [Path(name) for name in sorted(glob.glob(str(each)))]


def _stored(address: str | Path, patterns: Sequence[str]) -> list[File]:
    pa, fs = needs("pyarrow", "data"), needs("pyarrow.fs", "data")
    plain, question, options = str(address).partition("?")
    try:
        filesystem, path = fs.FileSystem.from_uri(str(address))
        folder, wanted = path, patterns
        if any(sign in path for sign in "*["):
            folder, _, named = path.rpartition("/")
            wanted = [named]
        elif filesystem.get_file_info(path).type == fs.FileType.File:
            return [str(address)]
        every = filesystem.get_file_info(fs.FileSelector(folder, allow_not_found=True))
    except (pa.ArrowException, OSError, ImportError) as error:
        raise DataError(
            f"{address} cannot be reached: {error}. Check the address and the store's keys."
        ) from error
    store = plain.removesuffix(path)
    files = [each for each in sorted(every, key=lambda each: str(each.path)) if each.type == fs.FileType.File]
    found = _first(files, lambda each: str(each.base_name), wanted)
    return [f"{store}{each.path}{question}{options}" for each in found]


def _first(files: Sequence[T], name: Callable[[T], str], patterns: Sequence[str]) -> list[T]:
    """Return the names that match the first pattern which matches any."""
    for pattern in patterns:
        found = [each for each in files if any(fnmatch.fnmatch(name(each), one) for one in pattern.split())]
        if found:
            return found
    return []


def suffix_of(file: File) -> str:
    """Return the suffix of a path or URI, such as ``.parquet``."""
    return Path(str(file).partition("?")[0]).suffix


def as_local(files: Sequence[File], what: str) -> list[Path]:
    """Return files as local paths.

    Raises:
        DataError: a file is not on this machine.
    """
    for each in files:
        if is_address(each):
            raise DataError(
                f"{each}: {what} are read from this machine only. Copy it here, or make it Parquet."
            )
    return [Path(each) for each in files]
