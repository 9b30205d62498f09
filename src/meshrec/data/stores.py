"""Files in stores: reads with retries, and a check that a file stays the same.

[Note: reading from a store]
- An address is read by pyarrow, or by fsspec if pyarrow does not know its scheme. The two libraries differ in
  what they retry and for how long, so every request goes through `Store.retried`.
- A store cannot lock a file. `StoredFile.version` is the file's size and ETag, or modification time. Whoever
  opens a file again passes the version of the first time, and a file with another version is an error. A file
  may also change between two reads, so `StoredFile.check` asks for the version again at the end.
- All failures are `StoreError`, and none is an ``OSError``. With ``on_error="skip"``, readers skip and count
  what raises an ``OSError``, as damaged. A store that cannot be reached is not damage.
"""

import asyncio
import contextlib
import functools
import io
import logging
import os
import random
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import quote

from typing_extensions import override

from meshrec.data.arrow import pa, pa_fs
from meshrec.data.faults import DataError, needs

RETRIES = 5
"""Retries of a failed request, unless the address has the option ``retries``."""
_MAX_RETRIES = 100
_FIRST_WAIT, _MAX_WAIT = 0.2, 20.0
"""Seconds to wait before the first retry, and the limit for the waits, which double."""
_SCHEMES = {"s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs", "hf", "file"}
"""Schemes that pyarrow reads. fsspec reads other schemes."""
_CHANGE_FIELDS = (
    *("ETag", "etag", "mtime", "Last-Modified", "LastModified", "last_modified"),
    *("updated", "created"),
)
"""Fields of fsspec's file information that differ after a change."""
_KEYS_REFUSED = r"AWS Error (?:ACCESS_DENIED|INVALID_|SIGNATURE_|UNRECOGNIZED_CLIENT|MISSING_AUTH)"
_PERMANENT = re.compile(
    rf"{_KEYS_REFUSED}|AWS Error (?:NO_SUCH_|\w*NOT_FOUND)|HTTP status (?:3\d\d|4(?!08|29)\d\d)"
)
"""In the message of an error which a retry does not help against."""
# Messages after which wrong keys are the likely cause.
_DENIED = re.compile(rf"{_KEYS_REFUSED}|HTTP status 40[13]")
_KEYS = (
    "Check the store's keys: for S3 they are AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile in "
    "AWS_PROFILE, as for the store's command-line tools."
)
_random = random.Random()  # not the global generator, whose state belongs to the user
_logger = logging.getLogger("meshrec")
_T = TypeVar("_T")


class StoreError(DataError):
    """Error if a store cannot be reached or refuses access, or if a file in the store has changed."""


class Store:
    """File system of a store.

    Args:
        filesystem: pyarrow's file system.
        retries: retries of a failed request.
    """

    def __init__(self, filesystem: Any, retries: int) -> None:
        self.filesystem = filesystem
        self.retries = retries

    def retried(self, call: Callable[[], _T], address: str) -> _T:
        """Make a request, and return its result. A failed request is repeated after growing waits.

        Raises:
            StoreError: the request failed for a reason that lasts, or all retries failed.
        """
        for retry in range(self.retries + 1):
            try:
                return call()
            except Exception as error:
                if not _is_of_store(error):
                    raise
                text = str(error).rstrip(".") or type(error).__name__
                if not _may_pass(error):
                    is_denied = isinstance(error, PermissionError) or _DENIED.search(text)
                    remedy = _KEYS if is_denied else "Check the address."
                    raise StoreError(f"{address} cannot be read: {text}. {remedy}") from error
                if retry == self.retries:
                    raise StoreError(
                        f"{address} cannot be read: {text}; tried {retry + 1} times. Check the network and "
                        "the store, or allow more retries by an option of the address, as in "
                        "s3://bucket/clicks?retries=20."
                    ) from error
                # A random part, so that ranks which failed together do not return together.
                wait = min(_FIRST_WAIT * 2**retry, _MAX_WAIT) * _random.uniform(0.5, 1.0)
                message = "%s: %s; retry %d of %d in %.1f s"
                _logger.warning(message, address, text, retry + 1, self.retries, wait)
                time.sleep(wait)
        raise AssertionError("unreachable")

    def info(self, path: str, address: str) -> Any:
        """Return pyarrow's ``FileInfo`` for a path. If it does not exist, the type is NotFound."""
        return self.retried(lambda: self.filesystem.get_file_info(path), address)

    def listed(self, folder: str, address: str) -> list[Any]:
        """Return pyarrow's ``FileInfo`` for everything in a folder, sorted by path.

        Args:
            folder: path of the folder. A missing folder is empty.
            address: address of the folder, for messages.
        """
        infos = self.retried(lambda: listed(self.filesystem, folder), address)
        return sorted(infos, key=lambda info: str(info.path))


def listed(filesystem: Any, folder: str, *, recursive: bool = False) -> list[Any]:
    """Return pyarrow's ``FileInfo`` for everything in a folder, which is empty if it is missing.

    Args:
        filesystem: pyarrow's file system.
        folder: path of the folder.
        recursive: whether to include subfolders.
    """
    selector = pa_fs.FileSelector(folder, recursive=recursive, allow_not_found=True)
    try:
        return list(filesystem.get_file_info(selector))
    except FileNotFoundError:
        # Despite allow_not_found, pyarrow 26 raises this if the folder is created during the call.
        return list(filesystem.get_file_info(selector))


class StoredFile(io.RawIOBase):
    """File in a store, open for reading. Failed reads are repeated.

    Args:
        address: address of the file.
        version: version that the file must have; None: any.

    Raises:
        StoreError: the file cannot be opened, or has another version.
    """

    def __init__(self, address: str, version: str | None = None) -> None:
        super().__init__()
        self._address = address
        self._store, self._path = store_of(address)
        # Offset of the next read.
        self._position = 0
        # The file is replaced when a failed read is repeated. The version stays that of the first time.
        self._file, self.version = self._store.retried(self._open, address)
        """``version`` identifies the content; see [Note: reading from a store]."""
        self._size = int(self._store.retried(self._file.size, address))
        self._compare(self.version, version)

    def check(self) -> None:
        """Check that the file has not changed since it was opened.

        Raises:
            StoreError: the file has changed, or the store cannot be reached.
        """
        file, version = self._store.retried(self._open, self._address)
        file.close()
        self._compare(version, self.version)

    @override
    def read(self, size: int | None = -1) -> bytes:
        """Return the next ``size`` bytes, or fewer at the file's end. A negative size means all bytes."""
        remaining = max(self._size - self._position, 0)
        num = remaining if size is None or size < 0 else min(size, remaining)
        if num == 0:
            return b""
        is_first = True

        def read() -> bytes:
            nonlocal is_first
            if not is_first:
                # A new connection, and perhaps a changed file.
                self._file.close()
                self._file, version = self._open()
                self._compare(version, self.version)
            is_first = False
            content = bytes(self._file.read_at(num, self._position))
            if len(content) != num:
                raise OSError(f"got {len(content)} of {num} bytes from byte {self._position} on")
            return content

        content = self._store.retried(read, self._address)
        self._position += num
        return content

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with the next bytes, and return their number."""
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    @override
    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position; see `io.IOBase.seek`."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    @override
    def tell(self) -> int:
        return self._position

    @override
    def seekable(self) -> bool:
        return True

    @override
    def readable(self) -> bool:
        return True

    @override
    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def _open(self) -> tuple[Any, str]:
        """Open the file, and return it with its version. Makes a request."""
        filesystem = self._store.filesystem
        if isinstance(filesystem, pa_fs.PyFileSystem):
            # pyarrow would ask fsspec first whether the file exists, and all failures would look like "no".
            file = pa.PythonFile(filesystem.handler.fs.open(self._path, "rb"), mode="r")
        else:
            file = filesystem.open_input_file(self._path)
        return file, _version(filesystem, file, self._path)

    def _compare(self, version: str, expected: str | None) -> None:
        if expected not in (None, version):
            raise StoreError(
                f"{self._address} has changed while it was read: it was {expected}, and is {version}. Start "
                "again, and write new data under new names."
            )


def store_of(address: str) -> tuple[Store, str]:
    """Return the store of an address, and the path in it.

    Connections are shared by all addresses with the same store and options.

    Args:
        address: address, with options after a question mark, such as ``s3://bucket/clicks?region=eu-west-1``.
            The option ``retries`` is the number of retries of a failed request; other options are pyarrow's.

    Raises:
        StoreError: the address or an option is wrong, or a package for the scheme is missing.
    """
    # Connections do not survive a fork.
    return _store_of(address, os.getpid())


def version_of(address: str) -> str:
    """Return the version of a file in a store; see [Note: reading from a store].

    Raises:
        StoreError: the file cannot be opened.
    """
    with StoredFile(address) as file:
        return file.version


def modification_time_of(address: str) -> int | None:
    """Return the modification time of a file in a store, in microseconds since 1970; None if unknown.

    Raises:
        StoreError: the file cannot be read.
    """
    store, path = store_of(address)
    if isinstance(store.filesystem, pa_fs.PyFileSystem):
        # pyarrow looks only for the name that local files use.
        with contextlib.suppress(NotImplementedError, KeyError):
            modified = store.retried(lambda: store.filesystem.handler.fs.modified(path), address)
            return int(modified.timestamp() * 1e6)
        return None
    nanoseconds = store.info(path, address).mtime_ns
    return None if nanoseconds is None else int(nanoseconds) // 1000


_stores: dict[tuple[int, str, str], Store] = {}
"""Stores with open connections, by process, scheme with host, and options."""


# Cached, because pyarrow asks S3 for the region of a bucket when it creates a file system.
@functools.lru_cache(maxsize=1 << 12)
def _store_of(address: str, pid: int) -> tuple[Store, str]:
    plain, retries, options = _split_options(address)
    scheme, _, location = plain.partition("://")
    try:
        if scheme not in _SCHEMES:
            filesystem, path = needs("fsspec.core", "data").url_to_fs(f"{plain}{options}")
            return Store(pa_fs.PyFileSystem(pa_fs.FSSpecHandler(filesystem)), retries), path
        # Patterns and names may have signs that are not allowed in a URI.
        uri = f"{scheme}://{quote(location, safe='%/:@=+,~!$&()*;')}{options}"
        filesystem, path = pa_fs.FileSystem.from_uri(uri)
    except (pa.ArrowException, OSError, ImportError, ValueError) as error:
        raise StoreError(
            f"{address} cannot be reached: {str(error).rstrip('.')}. Check the address; an example is "
            "s3://bucket/clicks. Addresses may have the schemes of pyarrow.fs and fsspec."
        ) from error
    key = (pid, f"{scheme}://{location.partition('/')[0]}", f"{retries} {options}")
    return _stores.setdefault(key, Store(_without_own_retries(filesystem), retries)), path


def _split_options(address: str) -> tuple[str, int, str]:
    """Return an address without options, the number of retries, and the other options with question mark."""
    plain, _, query = address.partition("?")
    options = query.split("&") if query else []
    retries = RETRIES
    for option in options:
        name, _, value = option.partition("=")
        if name == "retries":
            if not value.isdecimal() or int(value) > _MAX_RETRIES:
                raise StoreError(
                    f"{address}: retries must be a number from 0 to {_MAX_RETRIES}, got {value!r}."
                )
            retries = int(value)
    options = [option for option in options if not option.startswith("retries=")]
    return plain, retries, f"?{'&'.join(options)}" if options else ""


def _without_own_retries(filesystem: Any) -> Any:
    """Return the file system with requests that fail at once. Only S3 has an option for it.

    With its default, pyarrow makes 31 attempts of a request in 6 seconds, and then gives up.
    """
    kind: Any = getattr(pa_fs, "S3FileSystem", None)
    if kind is None or not isinstance(filesystem, kind):
        return filesystem
    # The options, as they are pickled.
    _, (options,) = filesystem.__reduce__()
    return kind(**options, retry_strategy=pa_fs.AwsStandardS3RetryStrategy(max_attempts=1))


def _version(filesystem: Any, file: Any, path: str) -> str:
    """Return the version of an open file."""
    size = f"{file.size():,} bytes"
    if isinstance(filesystem, pa_fs.PyFileSystem):
        inner = filesystem.handler.fs
        # fsspec may keep listings, and would then report an old version.
        inner.invalidate_cache(path)
        info = inner.info(path)
        return f"{size}, {next((str(info[name]) for name in _CHANGE_FIELDS if info.get(name)), 'no date')}"
    tags = {name.lower(): value for name, value in (file.metadata() or {}).items()}
    tag = tags.get("etag")
    if tag is not None:
        return f"{size}, ETag {tag.decode() if isinstance(tag, bytes) else tag}"
    return f"{size}, written {filesystem.get_file_info(path).mtime_ns}"


def _is_of_store(error: Exception) -> bool:
    """Return whether an error is from a store, and not from the code that calls it.

    aiohttp, which fsspec uses for HTTP, has errors of its own.
    """
    kinds = (OSError, asyncio.TimeoutError, pa.ArrowException)
    return isinstance(error, kinds) or type(error).__module__.split(".")[0] == "aiohttp"


def _may_pass(error: Exception) -> bool:
    """Return whether a request that failed with this error may succeed later."""
    permanent = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError)
    if isinstance(error, permanent):  # pyarrow's ArrowInvalid is a ValueError
        return False
    status = getattr(error, "status", None)  # of aiohttp
    if isinstance(status, int) and 300 <= status < 500:
        return status in (408, 429)
    return not _PERMANENT.search(str(error))
