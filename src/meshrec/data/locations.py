"""Locations of data files: paths, folders and patterns, on local disks or in a store that pyarrow supports.

A store is a remote file system such as S3. A file in a store is named by a URI.
"""

import fnmatch
import glob
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from meshrec.data.arrow import pa, pa_fs
from meshrec.data.dataset import Paths
from meshrec.data.faults import DataError

T = TypeVar("T")
File = Path | str
"""Local file, or its URI in a store, such as ``s3://bucket/clicks.parquet``."""

_CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
"""Compression codec of pyarrow by the last suffix of a file name."""


# Compressed text files are decompressed while they are read. Parquet files compress their own columns.
_TSV_SUFFIXES = (".tsv", *(f".tsv{suffix}" for suffix in _CODECS))
_JSON_SUFFIXES = tuple(f"{name}{suffix}" for name in (".jsonl", ".ndjson") for suffix in ("", *_CODECS))
_CSV_SUFFIXES = (".csv", *(f".csv{suffix}" for suffix in _CODECS), *_TSV_SUFFIXES, *_JSON_SUFFIXES)
_PARQUET_OR_CSV = ("*.parquet", " ".join(f"*{suffix}" for suffix in _CSV_SUFFIXES))


def expand(paths: Paths, *patterns: str) -> list[File]:
    """Return all files that paths, folders and glob patterns stand for.

    A folder stands for the files in it and in its ``NAME=VALUE`` subfolders. Only files that match
    ``patterns`` are used.

    URIs may have the schemes of ``pyarrow.fs.FileSystem.from_uri``: s3, gs, abfs, hdfs, hf and file.
    Credentials are found in the same way as by the store's command-line tools.

    Args:
        paths: one or more paths, folders or glob patterns; URIs for files in a store.
        patterns: file names to use in folders. The first entry that matches any file is used alone, and may
            hold several glob patterns, separated by blanks.

    Returns:
        Files, sorted by name for every path; URIs for files in a store.

    Raises:
        DataError: a path stands for no file, or a store is unreachable.
    """
    files: list[File] = []
    for path in [paths] if isinstance(paths, str | Path) else paths:
        matches = _expand_uri(path, patterns) if is_address(path) else _expand_path(path, patterns)
        if not matches:
            # A relative path is searched in the current folder, so the message names it.
            folder_note = "" if is_address(path) or Path(path).is_absolute() else f" in {Path.cwd()}"
            searched = " or ".join(patterns)
            raise DataError(
                f"{path} stands for no file{folder_note}. Name files, or a folder, which is searched for "
                f"{searched}."
            )
        files += matches
    if not files:
        raise DataError("no paths were given.")
    return files


def expand_tables(paths: Paths) -> tuple[list[File], bool]:
    """Return the Parquet files or text files that paths stand for; see `expand`.

    In a folder, text files (CSV, TSV or JSON lines) are used only if it has no Parquet files.

    Returns:
        The files, and whether they are text files.

    Raises:
        DataError: as for `expand`, or there are files with both formats.
    """
    files = expand(paths, *_PARQUET_OR_CSV)
    text = [is_csv(file) for file in files]
    if any(text) and not all(text):
        raise DataError(f"{[str(file) for file in files]} are CSV and other files. Give files of one kind.")
    return files, all(text)


def is_address(path: str | Path) -> bool:
    """Return whether a path is the URI of a file in a store."""
    return isinstance(path, str) and "://" in path


def is_csv(path: str | Path) -> bool:
    """Return whether a path, URI or pattern has the suffix for CSV, TSV or JSON lines, possibly
    compressed."""
    return _has_suffix(path, _CSV_SUFFIXES)


def is_tsv(path: str | Path) -> bool:
    """Return whether a path, URI or pattern has the suffix for tab-separated text, possibly compressed."""
    return _has_suffix(path, _TSV_SUFFIXES)


def is_json(path: str | Path) -> bool:
    """Return whether a path, URI or pattern has the suffix for JSON lines, possibly compressed."""
    return _has_suffix(path, _JSON_SUFFIXES)


def _has_suffix(path: str | Path, suffixes: tuple[str, ...]) -> bool:
    # A URI may have options after a question mark.
    name = str(path).partition("?")[0] if is_address(path) else str(path)
    return name.lower().endswith(suffixes)


def not_parquet(file: File, error: Exception) -> str:
    """Return the error message for a file that cannot be read as Parquet.

    For a file name without a Parquet suffix, the message says how to name CSV files.
    """
    if suffix_of(file).lower() in (".parquet", ".pq", ""):
        return f"{file} cannot be read as Parquet: {error}"
    return (
        f"{file} is neither Parquet ({error}) nor named as CSV (*{', *'.join(_CSV_SUFFIXES)}). Write it as "
        "CSV, with commas and a header, or as Parquet"
    )


def codec_of(file: File) -> str | None:
    """Return the name of the compression codec for a file name, such as "gzip"; None if not compressed."""
    return _CODECS.get(suffix_of(file).lower())


def opened(file: File) -> Any:
    """Open a local file or a file in a store for reading by pyarrow. The caller closes it.

    Raises:
        OSError: the file is unreachable.
    """
    if not is_address(file):
        return Path(file).open("rb")
    filesystem, path = pa_fs.FileSystem.from_uri(str(file))
    return filesystem.open_input_file(path)


def _expand_path(location: str | Path, patterns: Sequence[str]) -> list[File]:
    """Return the files that a local path stands for. It may be a file, a folder or a glob pattern.

    In a folder, only the first entry of ``patterns`` that matches any file is used.
    """
    path = Path(location)
    if path.is_dir():
        return [*_match_first_pattern(_files_in(path), lambda file: file.name, patterns)]
    return [path] if path.exists() else [Path(name) for name in sorted(glob.glob(str(location)))]


def _files_in(folder: Path) -> list[Path]:
    """Return the paths in a folder, sorted by name. The files in a ``NAME=VALUE`` subfolder replace it."""
    files: list[Path] = []
    for path in sorted(folder.iterdir()):
        files += _files_in(path) if "=" in path.name and path.is_dir() else [path]
    return files


def _stored_in(filesystem: Any, folder: str) -> list[Any]:
    """Return pyarrow's ``FileInfo`` for the files in a store's folder, in the order of `_files_in`."""
    files: list[Any] = []
    # A missing folder has no files, which `expand` reports.
    selector = pa_fs.FileSelector(folder, allow_not_found=True)
    for info in sorted(filesystem.get_file_info(selector), key=lambda info: str(info.path)):
        is_partition = "=" in info.base_name and info.type == info.type.Directory
        files += _stored_in(filesystem, info.path) if is_partition else [info]
    return files


def _expand_uri(address: str | Path, patterns: Sequence[str]) -> list[File]:
    """Return the URIs of the files that a URI stands for. It may name a file, a folder or a glob pattern.

    In a folder, only the first entry of ``patterns`` that matches any file is used.
    """
    plain, question, options = str(address).partition("?")
    try:
        filesystem, path = pa_fs.FileSystem.from_uri(str(address))
        folder, file_patterns = path, patterns
        # A pattern in the last path component selects files in the folder before it.
        if any(sign in path for sign in "*["):
            folder, _, named = path.rpartition("/")
            file_patterns = [named]
        elif filesystem.get_file_info(path).type == pa_fs.FileType.File:
            return [str(address)]
        infos = _stored_in(filesystem, folder)
    except (pa.ArrowException, OSError, ImportError) as error:
        raise DataError(
            f"{address} cannot be reached: {error}. Check the address and the store's keys."
        ) from error
    # from_uri drops scheme, bucket and options. Put them back, so results are URIs again.
    store = plain.removesuffix(path)
    files = [info for info in infos if info.type == pa_fs.FileType.File]
    matches = _match_first_pattern(files, lambda info: str(info.base_name), file_patterns)
    escaped = [info.path.replace("%", "%25") for info in matches]  # Hive folder names contain %
    return [f"{store}{path}{question}{options}" for path in escaped]


def _match_first_pattern(files: Sequence[T], name: Callable[[T], str], patterns: Sequence[str]) -> list[T]:
    """Try the entries of ``patterns`` in order, and return the files that match the first successful entry.

    Args:
        files: files to select from.
        name: function returning a file's name.
        patterns: entries with one or more glob patterns, separated by blanks. A file matches an entry if it
            matches any pattern in it.

    Returns:
        The matching files, in order; empty if no entry matches a file.
    """
    for pattern in patterns:
        matches = [
            file for file in files if any(fnmatch.fnmatch(name(file), part) for part in pattern.split())
        ]
        if matches:
            return matches
    return []


def suffix_of(file: File) -> str:
    """Return the suffix of a path or URI, such as ``.parquet``."""
    return Path(str(file).partition("?")[0]).suffix


def as_local(files: Sequence[File], description: str) -> list[Path]:
    """Convert files to local paths.

    Args:
        files: paths and URIs.
        description: kind of the files, in plural, for the error message.

    Raises:
        DataError: a file is in a store.
    """
    for file in files:
        if is_address(file):
            raise DataError(
                f"{file}: {description} are read from this machine only. Copy it here, or make it Parquet."
            )
    return [Path(file) for file in files]
