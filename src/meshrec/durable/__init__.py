"""Files that outlive a crash and tell when they were damaged: for checkpoints, deltas, packages and runs."""

from meshrec.durable.digests import DIGESTS, read_digests, sha256_of, verify_folder, write_digests
from meshrec.durable.files import (
    DamageError,
    durable_file,
    durable_folder,
    open_regular,
    read_regular,
    sync_folder,
    write_durably,
)
from meshrec.durable.sealed import sealed, unsealed

__all__ = [
    "DIGESTS",
    "DamageError",
    "durable_file",
    "durable_folder",
    "open_regular",
    "read_digests",
    "read_regular",
    "sealed",
    "sha256_of",
    "sync_folder",
    "unsealed",
    "verify_folder",
    "write_digests",
    "write_durably",
]
