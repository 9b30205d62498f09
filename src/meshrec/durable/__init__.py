"""Files that outlive a crash and tell when they were damaged: for checkpoints, deltas, packages and runs."""

from meshrec.durable.digests import (
    DIGESTS,
    FileDigest,
    read_digests,
    sha256_of,
    tree_hash_of,
    verify_file,
    verify_folder,
    write_digests,
)
from meshrec.durable.files import (
    DamageError,
    durable_file,
    durable_folder,
    open_regular,
    read_regular,
    sync_folder,
    write_durably,
)
from meshrec.durable.scratch import scratch_folder
from meshrec.durable.sealed import sealed, unsealed

__all__ = [
    "DIGESTS",
    "DamageError",
    "FileDigest",
    "durable_file",
    "durable_folder",
    "open_regular",
    "read_digests",
    "read_regular",
    "scratch_folder",
    "sealed",
    "sha256_of",
    "sync_folder",
    "tree_hash_of",
    "unsealed",
    "verify_file",
    "verify_folder",
    "write_digests",
    "write_durably",
]
