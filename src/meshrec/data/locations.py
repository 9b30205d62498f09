"""Locations of data files: paths, folders and patterns, on local disks or in a store.

A store is a remote file system such as S3. A file in a store is named by an address, which is a URI.
"""

import fnmatch
import glob
import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from meshrec.data.arrow import pa, pa_fs
from meshrec.data.dataset import Paths
from meshrec.data.faults import DataError

if TYPE_CHECKING:
    from meshrec.data.stores import Store

T = TypeVar("T")
File = Path | str
"""Local file, or its address in a store, such as ``s3://bucket/clicks.parquet``."""

_CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
"""Compression codec of pyarrow by the last suffix of a file name."""

_SECRET = re.compile("password|secret|token|key", re.IGNORECASE)
"""Pattern for names of address options whose values are secrets."""
HIDDEN = "***"
"""Text that replaces secrets in addresses."""

_BUCKET_SCHEMES = ("s3://", "gs://", "gcs://")
"""Stores whose paths start with a bucket."""
_ESCAPED = re.compile(r"[%?*\[]")
"""Signs in file names which have another meaning in an address."""
_BUFFER_BYTES = 8 << 20
"""Bytes per request when text is read from a store, which parsers read in smaller pieces."""

# Compressed text files are decompressed while they are read. Parquet files compress their own columns.
_TSV_SUFFIXES = (".tsv", *(f".tsv{suffix}" for suffix in _CODECS))
_JSON_SUFFIXES = tuple(f"{name}{suffix}" for name in (".jsonl", ".ndjson") for suffix in ("", *_CODECS))
_CSV_SUFFIXES = (".csv", *(f".csv{suffix}" for suffix in _CODECS), *_TSV_SUFFIXES, *_JSON_SUFFIXES)
_PARQUET_OR_CSV = ("*.parquet", " ".join(f"*{suffix}" for suffix in _CSV_SUFFIXES))


def expand(paths: Paths, *patterns: str) -> list[File]:
    """Return all files that paths, folders and glob patterns stand for.

    A folder stands for the files in it and in its ``NAME=VALUE`` subfolders. Only files that match
    ``patterns`` are used. A folder that a glob pattern matches stands for its files, too.

    Addresses of stores may have the schemes of ``pyarrow.fs.FileSystem.from_uri`` (s3, gs, abfs, hdfs, hf and
    file) and those of installed fsspec packages, such as https. Credentials are found in the same way as by
    the store's command-line tools. For options in an address, see `meshrec.data.stores.store_of`.

    Args:
        paths: one or more paths, folders or glob patterns; addresses for files in a store.
        patterns: file names to use in folders. The first entry that matches any file is used alone, and may
            hold several glob patterns, separated by blanks.

    Returns:
        Files, sorted by name for every path; addresses for files in a store.

    Raises:
        DataError: a path stands for no file, or a store is unreachable.
    """
    files: list[File] = []
    for path in [paths] if isinstance(paths, str | Path) else paths:
        matches = list_files(path, *patterns)
        if not matches:
            note = _missing_bucket(str(path)) if is_address(path) else ""
            if not is_address(path) and not Path(path).is_absolute():
                # A relative path is searched in the current folder, so the message names it.
                note = f" in {Path.cwd()}"
            searched = " or ".join(patterns)
            raise DataError(
                f"{path} stands for no file{note}. Name files, or a folder, which is searched for {searched}."
            )
        files += matches
    if not files:
        raise DataError("no paths were given.")
    return files


def list_files(path: str | Path, *patterns: str) -> list[File]:
    """Return all files that a path stands for, as `expand` does; an empty list if there are none."""
    return _expand_address(str(path), patterns) if is_address(path) else _expand_path(path, patterns)


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
    """Return whether a path is the address of a file in a store, which is a URI."""
    return isinstance(path, str) and "://" in path


def without_secrets(source: str) -> str:
    """Return an address with user, password and secret options replaced by `HIDDEN`; a path unchanged."""
    if not is_address(source):
        return source
    parts = urlsplit(source)
    user, at, host = parts.netloc.rpartition("@")
    options = [
        f"{name}={HIDDEN if _SECRET.search(name) else value}"
        for name, _, value in (option.partition("=") for option in parts.query.split("&") if option)
    ]
    query = f"?{'&'.join(options)}" if options else ""
    return f"{parts.scheme}://{HIDDEN if user else ''}{at}{host}{parts.path}{query}"


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


@contextmanager
def opened(file: File, version: str | None = None, *, buffered: bool = False) -> Iterator[Any]:
    """Open a local file or a file in a store for reading by pyarrow.

    Args:
        file: path or address.
        version: version that a file in a store must have; see `meshrec.data.stores.version_of`. None: any.
        buffered: whether small reads of a file in a store are combined. For text.

    Raises:
        OSError: a local file cannot be read.
        StoreError: a file in a store cannot be read, or has changed since it was opened.
    """
    if not is_address(file):
        with Path(file).open("rb") as local:
            yield local
        return
    from meshrec.data.stores import StoredFile

    with StoredFile(str(file), version) as stored:
        try:
            yield io.BufferedReader(stored, _BUFFER_BYTES) if buffered else stored
        except (pa.ArrowException, OSError):
            # A file that has changed looks damaged.
            stored.check()
            raise
        stored.check()


def _expand_path(location: str | Path, patterns: Sequence[str]) -> list[File]:
    """Return the files that a local path stands for. The path may be a file, a folder or a glob pattern.

    In a folder, only the first entry of ``patterns`` that matches any file is used.
    """
    path = Path(location)
    matches = [path] if path.exists() else [Path(name) for name in sorted(glob.glob(str(location)))]
    files: list[Path] = []
    for match in matches:
        if match.is_dir():
            files += _match_first_pattern(_files_in(match), attrgetter("name"), patterns)
        else:
            files.append(match)
    return [*files]


def _files_in(folder: Path) -> list[Path]:
    """Return the paths in a folder, sorted by name. The files in a ``NAME=VALUE`` subfolder replace it."""
    files: list[Path] = []
    for path in sorted(folder.iterdir()):
        files += _files_in(path) if "=" in path.name and path.is_dir() else [path]
    return files


def _expand_address(address: str, patterns: Sequence[str]) -> list[File]:
    """Return the addresses of the files that an address stands for.

    An address may name a file, a folder or a glob pattern, with wildcards in any part after the bucket. In a
    folder, only the first entry of ``patterns`` that matches any file is used.
    """
    from meshrec.data.stores import store_of

    plain, question, options = address.partition("?")
    parts = plain.rstrip("/").split("/")
    # After the scheme and the bucket, the first part that is a pattern.
    num_literal = next(
        (n for n, part in enumerate(parts) if n > 2 and any(sign in part for sign in "*[")), len(parts)
    )
    store, folder = store_of("/".join(parts[:num_literal]) + question + options)
    if num_literal == len(parts):
        info = store.info(folder, address)
        if info.type == pa_fs.FileType.File:
            return [address]
        if "::" in plain:
            raise DataError(f"{address} stands for no file. A chained address must name a single file.")
        matches = _matches_in_store(store, folder, patterns, address)
    else:
        matches = []
        for info in _glob(store, folder, [unquote(part) for part in parts[num_literal:]], address):
            is_file = info.type == pa_fs.FileType.File
            matches += [info] if is_file else _matches_in_store(store, info.path, patterns, address)
    # Paths in the store become addresses again: below the literal folder, names are appended to its address.
    literal = "/".join(parts[:num_literal])
    names = [str(info.path)[len(folder.rstrip("/")) :] for info in matches]
    return [f"{literal}{_ESCAPED.sub(_escape, name)}{question}{options}" for name in names]


def _escape(sign: re.Match[str]) -> str:
    return f"%{ord(sign[0]):02X}"


def _glob(store: "Store", folder: str, parts: Sequence[str], address: str) -> list[Any]:
    """Return pyarrow's ``FileInfo`` for the files and folders that match a glob pattern, sorted by path."""
    matches = [
        info for info in store.listed(folder, address) if fnmatch.fnmatchcase(info.base_name, parts[0])
    ]
    if len(parts) == 1:
        return matches
    folders = [str(info.path) for info in matches if info.type == pa_fs.FileType.Directory]
    return [info for path in folders for info in _glob(store, path, parts[1:], address)]


def _matches_in_store(store: "Store", folder: str, patterns: Sequence[str], address: str) -> list[Any]:
    """Return pyarrow's ``FileInfo`` for the files in a store's folder that match patterns; see `expand`."""
    files = [info for info in _stored_in(store, folder, address) if info.type == pa_fs.FileType.File]
    return _match_first_pattern(files, lambda info: str(info.base_name), patterns)


def _stored_in(store: "Store", folder: str, address: str) -> list[Any]:
    """Return pyarrow's ``FileInfo`` for a store folder's files, in the order of `_files_in`."""
    files: list[Any] = []
    for info in store.listed(folder, address):
        is_partition = "=" in info.base_name and info.type == pa_fs.FileType.Directory
        files += _stored_in(store, info.path, address) if is_partition else [info]
    return files


def _missing_bucket(address: str) -> str:
    """Return a note for an error message if an address's bucket does not exist; otherwise empty."""
    if not address.startswith(_BUCKET_SCHEMES):
        return ""
    from meshrec.data.stores import store_of

    store, path = store_of(address)
    bucket = path.partition("/")[0]
    is_missing = store.info(bucket, address).type == pa_fs.FileType.NotFound
    return f": the store has no bucket {bucket!r} for these keys" if is_missing else ""


def _match_first_pattern(files: Sequence[T], name: Callable[[T], str], patterns: Sequence[str]) -> list[T]:
    """Try the entries of ``patterns`` in order, and return the files that match the first successful entry.

    Args:
        patterns: entries with one or more glob patterns, separated by blanks. A file matches an entry if it
            matches any pattern in it.
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
    """Convert files to local paths. Raise DataError if one is in a store."""
    for file in files:
        if is_address(file):
            raise DataError(
                f"{file}: {description} are read from this machine only. Copy it here, or make it Parquet."
            )
    return [Path(file) for file in files]
