"""Atomic file writes, checksums against damage, and safe deletion, for checkpoints, packages and runs."""

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
    FULL,
    DamageError,
    durable_file,
    name_full_disk,
    open_regular,
    read_regular,
    sync_folder,
    write_durably,
)
from meshrec.durable.marks import PREFIX, Mark, mark, release, unlocked_marks
from meshrec.durable.removal import CreatedPath, is_below, remove_empty, remove_link, remove_named
from meshrec.durable.scratch import (
    abandon_scratch,
    durable_folder,
    join_scratch,
    make_scratch,
    remove_scratch,
    scratch_folder,
)
from meshrec.durable.sealed import sealed, unsealed

__all__ = [
    "DIGESTS",
    "FULL",
    "PREFIX",
    "CreatedPath",
    "DamageError",
    "FileDigest",
    "Mark",
    "abandon_scratch",
    "durable_file",
    "durable_folder",
    "is_below",
    "join_scratch",
    "make_scratch",
    "mark",
    "name_full_disk",
    "open_regular",
    "read_digests",
    "read_regular",
    "release",
    "remove_empty",
    "remove_link",
    "remove_named",
    "remove_scratch",
    "scratch_folder",
    "sealed",
    "sha256_of",
    "sync_folder",
    "tree_hash_of",
    "unlocked_marks",
    "unsealed",
    "verify_file",
    "verify_folder",
    "write_digests",
    "write_durably",
]
