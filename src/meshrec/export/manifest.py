"""The manifest of a package, and the check that its files are those that were written.

`check_package` reads every file before anything of the package is used. Packages with ``digests.txt`` are
compared by its CRC-32s, older ones by the SHA-256s in their manifest, which takes two to four times as long.
Both find accidents. Neither finds a forger, who can write new digests as well; a signature does (`signing`).
See docs/guides/security.md.
"""

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from meshrec.durable import (
    DIGESTS,
    DamageError,
    FileDigest,
    read_digests,
    read_regular,
    sha256_of,
    verify_folder,
)
from meshrec.durable.sealed import fields, integer, integers, items, mapping, parse, text, texts
from meshrec.export.archive import PackageError, extra_file
from meshrec.export.program import DENSE
from meshrec.export.signing import SIGNATURE, read_public_key, verify_signature
from meshrec.modules.served_table import INDEX

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

_log = logging.getLogger(__name__)

FORMAT = 2
MANIFEST, LAYOUT, WEIGHTS = "manifest.json", "layout.txt", "weights.bin"
COMPILED, EXPORTED = "program.pt2", "exported.pt2"
SHARED, SHARED_EXPORTED = "shared.pt2", "shared-exported.pt2"
INTERFACE = "interface.json"
"""The file in every exported program that holds what `interface_of` returned."""
ALIGNMENT = 4096
"""Bytes to whose multiples the tensors in ``weights.bin`` are padded."""
DTYPES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.uint8: "uint8",
    torch.int64: "int64",
}
_ITEM_SIZES = {name: dtype.itemsize for dtype, name in DTYPES.items()}
_MOST_BYTES = 1 << 28
_MOST_UNKNOWN_BYTES = 1 << 34
"""The most bytes of a file whose size neither ``digests.txt`` nor the manifest says."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIELDS = (
    *("format", "torch", "isa", "operators", "compiled", "features", "num_dense", "outputs", "shared"),
    *("rows", "weights", "quantised", "rounding", "about", "sha256"),
)
_OPTIONAL = ("hashed", "any_ids")
"""Fields of packages with hashed tables."""
_FORMULA = ("seed", "max_rows", "dim", "first_seed", "low", "high")
"""Fields of a hashed table's keys and first rows."""
_INTERFACE = ("features", "num_dense", "outputs", "shared", "rows", "quantised", "rounding")
_WHAT_TO_DO = "Copy the package again from where it was exported, or export the model again."


class WeightRecord(NamedTuple):
    """A tensor in ``weights.bin``; ``offset`` in bytes."""

    name: str
    dtype: str
    shape: list[int]
    offset: int

    @property
    def num_bytes(self) -> int:
        """The size of its values."""
        size = _ITEM_SIZES[self.dtype]
        for dim in self.shape:
            size *= dim
        return size


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a package.

    Raises:
        PackageError: the folder is not a package, its format is newer, or its manifest contradicts itself.
    """
    path = folder / MANIFEST
    try:
        found = parse(read_regular(path, _MOST_BYTES), "it")
    except (OSError, DamageError) as error:
        raise PackageError(
            f"{folder} is not a package: {path} cannot be read ({error}). Export a model."
        ) from error
    told = found.get("format") if isinstance(found, dict) else None
    if told != FORMAT:
        raise PackageError(f"{folder} is of format {told}, this version reads {FORMAT}. Export it again.")
    try:
        _check(found)
    except DamageError as error:
        raise PackageError(f"{path} is damaged: {error}. {_WHAT_TO_DO}") from error
    manifest: dict[str, Any] = found
    return manifest


def layout_of(manifest: Mapping[str, Any]) -> str:
    """Return the content of ``layout.txt``, the part of a manifest that C++ reads."""
    lines = [
        f"meshrec-package {FORMAT}",
        f"torch {manifest['torch']}",
        f"isa {manifest['isa']}",
        f"dense {manifest['num_dense']}",
    ]
    lines += [f"feature {feature}" for feature in manifest["features"]]
    for record in (WeightRecord(**each) for each in manifest["weights"]):
        shape = " ".join(map(str, [len(record.shape), *record.shape]))
        lines.append(f"weight {record.dtype} {shape} {record.offset} {record.name}")
    return "\n".join(lines) + "\n"


def interface_of(manifest: Mapping[str, Any]) -> str:
    """Return the interface of a program as JSON: what it was exported with and must be called with.

    Every exported program contains a copy. So a manifest with other types or shapes of weights, or with
    another order of features, is found not to belong to the program.
    """
    said = {name: manifest[name] for name in (*_INTERFACE, *_OPTIONAL) if name in manifest}
    return json.dumps({**said, "weights": [WeightRecord(**each) for each in manifest["weights"]]})


class CheckedPackage(NamedTuple):
    """A package whose files were compared with what was written, or that the caller trusts."""

    folder: Path
    """The folder that a link leads to."""
    manifest: dict[str, Any]
    """The manifest, from `read_manifest`."""
    version: str
    """The digest of the manifest, and so of all files."""
    weights: FileDigest | None
    """The digest of ``weights.bin``; None if the package has none or nothing was compared."""


def check_package(
    folder: str | Path, *, verify: bool = True, public_key: "str | Path | None" = None
) -> CheckedPackage:
    """Check the files of a package without executing any of them.

    Args:
        folder: the package.
        verify: compare every file with its checksums, which reads all of them. False only reads the manifest.
        public_key: PEM file of the ed25519 key that must have signed the package.

    Raises:
        PackageError: the folder is not a package, is damaged or unfinished, of a newer format, or not signed
            by the key.
        ValueError: the key cannot be read, or is given together with ``verify=False``.
        ModuleNotFoundError: a key is given, and the package cryptography is missing.
    """
    if public_key is not None and not verify:
        raise ValueError("a signature is checked by reading every file. Leave out verify=False, or the key.")
    key = None if public_key is None else read_public_key(public_key)
    # What a link leads to now: a link that is turned to another package meanwhile must not mix the two.
    folder = Path(folder).resolve()
    manifest = read_manifest(folder)
    version = sha256_of(folder / MANIFEST)[:12]
    for name in manifest["sha256"]:
        if not (folder / name).is_file():
            raise PackageError(f"{folder / name} is missing. Export the model again.")
    digest = verify_package(folder, manifest, key) if verify else None
    return CheckedPackage(folder, manifest, version, digest)


def verify_package(
    folder: Path, manifest: Mapping[str, Any], key: "Ed25519PublicKey | None" = None
) -> FileDigest | None:
    """Check every file of a package against its digest; log the progress if that takes seconds.

    Args:
        folder: the package.
        manifest: what `read_manifest` read in it.
        key: the public key of its signature, which is compared instead of the checksums.

    Returns: the digest of ``weights.bin``; None if the package has no ``digests.txt``.

    Raises:
        PackageError: a file is missing or differs (the message names the first such file and says what to
            do), or the package is not signed by the key.
    """
    names = [*manifest["sha256"], MANIFEST]
    try:
        digests = read_digests(folder) if _is_there(folder / DIGESTS) else None
        if digests is not None and (missing := [name for name in names if name not in digests]):
            raise DamageError(f"{folder / DIGESTS} lacks {missing[0]}")
        if key is not None:
            verify_signature(folder, names if digests is None else [*names, DIGESTS], key)
        elif digests is not None:
            verify_folder(folder, {name: digests[name] for name in names})
        else:
            _log.info("%s has no %s; its SHA-256s are compared, which takes longer", folder, DIGESTS)
            for name, digest in manifest["sha256"].items():
                most = _weights_end(manifest) if name == WEIGHTS else _MOST_UNKNOWN_BYTES
                if sha256_of(folder / name, most=most) != digest:
                    raise DamageError(f"{folder / name} is not what was written: its SHA-256 is another")
        if read_regular(folder / LAYOUT, _MOST_BYTES) != layout_of(manifest).encode():
            raise DamageError(f"{folder / MANIFEST} does not say what {LAYOUT} says")
        for name in (EXPORTED, SHARED_EXPORTED) if manifest["shared"] else (EXPORTED,):
            said = extra_file(folder / name, INTERFACE, _MOST_BYTES)  # None in packages of earlier releases
            if said is not None and said != interface_of(manifest).encode():
                raise DamageError(f"{folder / MANIFEST} does not say what {name} was exported with")
    except DamageError as error:
        raise PackageError(f"{error}. {_WHAT_TO_DO}") from error
    except OSError as error:
        raise PackageError(f"{error.filename} cannot be read ({error.strerror}). {_WHAT_TO_DO}") from error
    return None if digests is None else digests[WEIGHTS]


def _weights_end(manifest: Mapping[str, Any]) -> int:
    """Return the size of ``weights.bin``."""
    if not manifest["weights"]:
        return 0
    last = WeightRecord(**manifest["weights"][-1])
    end = last.offset + last.num_bytes
    return end + -end % ALIGNMENT


def _is_there(path: Path) -> bool:
    return path.is_symlink() or path.exists()


def _check(found: Any) -> None:
    """Check the type of every field that later steps use."""
    said = fields(found, "it", _FIELDS, _OPTIONAL)
    for name in ("torch", "isa", "operators"):
        _one_line(said[name], name)
    if not isinstance(said["compiled"], bool):
        raise DamageError("whether it is compiled must be true or false")
    features = [_one_line(each, "a feature") for each in texts(said["features"], "the list of features")]
    num_dense = integer(said["num_dense"], "the number of dense columns", high=1 << 31)
    text(said["outputs"], "the kind of outputs", allowed=("scores", "vectors"))
    known = [*features, *([DENSE] if num_dense else [])]
    for name in texts(said["shared"], "the list of shared features"):
        text(name, "a shared feature", allowed=known)
    for name, rows in mapping(said["rows"], "the rows by feature").items():
        text(name, "a feature with rows", allowed=features)
        integer(rows, f"the rows of {name!r}")
    names = _check_weights(items(said["weights"], "the list of weights"))
    for name, data_type in mapping(said["quantised"], "the quantised weights").items():
        text(name, "a quantised weight", allowed=names)
        text(data_type, f"the data type of {name!r}")
    _check_hashed(mapping(said.get("hashed", {}), "the hashed weights"), names)
    for name in texts(said.get("any_ids", []), "the list of features with any IDs"):
        text(name, "a feature with any IDs", allowed=features)
    if said["rounding"] is not None:
        text(said["rounding"], "the rounding")
    mapping(said["about"], "what it says about its run")
    _check_files(said)


def _check_weights(records: Sequence[Any]) -> list[str]:
    """Check that each weight follows directly on the one before it, as `export` writes them."""
    names, end = [], 0
    for each in records:
        said = fields(each, "a weight", WeightRecord._fields)
        name = _one_line(said["name"], "the name of a weight")
        text(said["dtype"], f"the dtype of {name!r}", allowed=tuple(_ITEM_SIZES))
        integers(said["shape"], f"the shape of {name!r}")
        offset = integer(said["offset"], f"the offset of {name!r}")
        if offset != end + -end % ALIGNMENT:
            raise DamageError(f"{name!r} is at {offset:,}, and the weight before it ends at {end:,}")
        end = integer(offset + WeightRecord(**said).num_bytes, f"the end of {name!r}")
        names.append(name)
    return texts(names, "the list of weights")


def _check_hashed(hashed: Mapping[str, Any], names: Sequence[str]) -> None:
    """Check the formulas of keys and first rows, and that the tensors of each table are there."""
    for name, said in hashed.items():
        if f"{name.removesuffix('weight')}starts" in names:
            raise PackageError(
                f"the keys of {name!r} are in the form of an earlier release. Export the model again."
            )
        for part in ("weight", *INDEX):
            text(f"{name.removesuffix('weight')}{part}", f"a part of {name[:80]!r}", allowed=names)
        formula = fields(said, f"the keys of {name!r}", _FORMULA)
        for part in ("seed", "max_rows", "dim", "first_seed"):
            integer(formula[part], f"the {part} of {name!r}")
        for part in ("low", "high"):
            if type(formula[part]) not in (int, float) or not math.isfinite(formula[part]):
                raise DamageError(f"the {part} of {name!r} is not a number")


def _check_files(said: Mapping[str, Any]) -> None:
    files = mapping(said["sha256"], "the list of files")
    for name, digest in files.items():
        if Path(name).name != name or name in ("", ".", "..", MANIFEST, DIGESTS, SIGNATURE) or "\0" in name:
            raise DamageError(f"its list of files has {name!r}, which is not a file of the folder")
        if not _SHA256.fullmatch(text(digest, f"the SHA-256 of {name!r}")):
            raise DamageError(f"the SHA-256 of {name!r} is {digest[:80]!r}")
    needed = [LAYOUT, WEIGHTS, EXPORTED]
    needed += [SHARED_EXPORTED] if said["shared"] else []
    if said["compiled"]:
        needed += [COMPILED, *([SHARED] if said["shared"] else [])]
    if missing := [name for name in needed if name not in files]:
        raise DamageError(f"its list of files lacks {missing}")


def _one_line(value: Any, what: str) -> str:
    found = text(value, what)
    if "\n" in found or "\r" in found:
        raise DamageError(f"{what} has a line break in it: {found[:80]!r}")
    return found
