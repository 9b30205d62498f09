"""Package manifest (``manifest.json``), and verification of all files in a package.

`check_package` reads every file before anything in the package is used. Packages with ``digests.txt`` are
verified by CRC-32, older packages by the SHA-256s in the manifest, which takes two to four times as long.
Both detect accidental damage, but not forgery, because a forger can write new digests. Signatures detect
forgery (`signing`). See docs/guides/security.md.
"""

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from meshrec.data.raw_values import DENSE
from meshrec.durable import (
    DIGESTS,
    DamageError,
    FileDigest,
    read_digests,
    read_regular,
    sha256_of,
    verify_folder,
)
from meshrec.durable.sealed import (
    check_fields,
    check_integer,
    check_integers,
    check_list,
    check_names,
    check_object,
    check_string,
    parse_json,
)
from meshrec.export.archive import PackageError, extra_file
from meshrec.export.signing import SIGNATURE, read_public_key, verify_signature
from meshrec.modules.served_table import INDEX

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

_log = logging.getLogger(__name__)

FORMAT = 2
"""Version of the package format. Other versions are rejected."""
MANIFEST, LAYOUT, WEIGHTS = "manifest.json", "layout.txt", "weights.bin"
COMPILED, EXPORTED = "program.pt2", "exported.pt2"
"""Files with the program for samples that share no features: compiled, and exported."""
SHARED, SHARED_EXPORTED = "shared.pt2", "shared-exported.pt2"
"""Files with the program for samples that share the features in the manifest field ``shared``."""
INTERFACE = "interface.json"
"""Extra file in every exported program's archive, with the `interface_of` output."""
ALIGNMENT = 4096
"""Alignment of tensors in ``weights.bin``, in bytes: a page, so tensors can be mapped."""
DTYPES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.uint8: "uint8",
    torch.int64: "int64",
}
_ITEM_SIZES = {name: dtype.itemsize for dtype, name in DTYPES.items()}
# Maximum size of a manifest, layout or interface, so that a forged file does not exhaust memory.
_MAX_BYTES = 1 << 28
# Maximum file size if the size is in neither ``digests.txt`` nor the manifest.
_MAX_UNKNOWN_BYTES = 1 << 34
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIELDS = (
    *("format", "torch", "isa", "operators", "compiled", "features", "num_dense", "outputs", "shared"),
    *("rows", "weights", "quantised", "rounding", "about", "sha256"),
)
# Manifest fields that only packages with hashed tables have.
_OPTIONAL = ("hashed", "any_ids")
# Hashed table fields: parameters for keys and for the initial rows of unseen IDs.
_FORMULA = ("seed", "max_rows", "dim", "first_seed", "low", "high")
_INTERFACE = ("features", "num_dense", "outputs", "shared", "rows", "quantised", "rounding")
_REMEDY = "Copy the package again from where it was exported, or export the model again."


class WeightRecord(NamedTuple):
    """Name, type and position of a tensor in ``weights.bin``.

    Attributes:
        name: parameter or buffer name in the exported model.
        dtype: dtype name, such as "float32".
        shape: tensor shape.
        offset: position of the first byte in the file, a multiple of `ALIGNMENT`.
    """

    name: str
    dtype: str
    shape: list[int]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor, without the padding after it."""
        # Python integers, which cannot overflow for a forged shape.
        size = _ITEM_SIZES[self.dtype]
        for dim in self.shape:
            size *= dim
        return size


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and validate a package manifest.

    Raises:
        PackageError: the folder is not a package, has another format, or the manifest is damaged.
    """
    path = folder / MANIFEST
    try:
        parsed = parse_json(read_regular(path, _MAX_BYTES), "it")
    except (OSError, DamageError) as error:
        raise PackageError(
            f"{folder} is not a package: {path} cannot be read ({error}). Export a model."
        ) from error
    # Before all other checks: other versions may have other fields.
    version = parsed.get("format") if isinstance(parsed, dict) else None
    if version != FORMAT:
        raise PackageError(f"{folder} has format {version}; this release reads {FORMAT}. Export it again.")
    try:
        _check_manifest(parsed)
    except DamageError as error:
        raise PackageError(f"{path} is damaged: {error}. {_REMEDY}") from error
    manifest: dict[str, Any] = parsed
    return manifest


def layout_of(manifest: Mapping[str, Any]) -> str:
    """Return the content of ``layout.txt``, which has the manifest fields that C++ needs, as plain lines."""
    lines = [
        f"meshrec-package {FORMAT}",
        f"torch {manifest['torch']}",
        f"isa {manifest['isa']}",
        f"dense {manifest['num_dense']}",
    ]
    lines += [f"feature {feature}" for feature in manifest["features"]]
    for record in (WeightRecord(**weight) for weight in manifest["weights"]):
        # The number of dimensions comes first: it tells a reader how many sizes follow.
        shape = " ".join(map(str, [len(record.shape), *record.shape]))
        lines.append(f"weight {record.dtype} {shape} {record.offset} {record.name}")
    return "\n".join(lines) + "\n"


def interface_of(manifest: Mapping[str, Any]) -> str:
    """Return the interface of a package's programs as JSON: weights, features and outputs.

    Every exported program contains a copy, which `verify_package` compares with the manifest. A manifest of
    another program, with other weight shapes or another feature order, is thereby detected.
    """
    values = {name: manifest[name] for name in (*_INTERFACE, *_OPTIONAL) if name in manifest}
    return json.dumps({**values, "weights": [WeightRecord(**weight) for weight in manifest["weights"]]})


class CheckedPackage(NamedTuple):
    """A package whose files have been verified, or which the caller trusts without verification.

    Attributes:
        folder: package folder, with links resolved.
        manifest: result of `read_manifest`.
        version: first 12 hexadecimal digits of the manifest's SHA-256. They identify the content of the whole
            package, because the manifest has the SHA-256s of all other files.
        weights: checksums of ``weights.bin``. With them, `Weights` detects whether another program changes
            the file while it is in use. None if the package has no ``digests.txt`` or was not verified.
    """

    folder: Path
    manifest: dict[str, Any]
    version: str
    weights: FileDigest | None


def check_package(
    folder: str | Path, *, verify: bool = True, public_key: "str | Path | None" = None
) -> CheckedPackage:
    """Verify that a package is complete and undamaged, without executing code from it.

    Args:
        folder: package folder.
        verify: whether to read all files and compare their checksums. False: only the manifest is read.
        public_key: PEM file with an ed25519 public key. The package must be signed with the matching private
            key. None: no signature is needed.

    Returns:
        The resolved folder, the manifest, and the checksums, to be passed to `Predictor`.

    Raises:
        PackageError: the package is damaged or incomplete, has another format, or is not signed by the key.
        ValueError: the key cannot be read, or is given together with ``verify=False``.
        ModuleNotFoundError: a key is given, but the cryptography package is missing.
    """
    if public_key is not None and not verify:
        raise ValueError(
            "public_key needs verify=True, since a signature covers every file. Use one of them."
        )
    key = None if public_key is None else read_public_key(public_key)
    # Resolve links once, so files from two packages are not mixed if a link is changed meanwhile.
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
    """Verify the checksums of all package files. Logs the progress of slow reads.

    With a key, the checksums are read from the signature. Without a key, they are read from ``digests.txt``,
    or from the manifest if the package has no ``digests.txt``. The manifest must also match ``layout.txt``
    and the interfaces in the exported programs.

    Args:
        folder: package folder.
        manifest: result of `read_manifest`.
        key: public key. The package must be signed with the matching private key. None: no signature is
            needed.

    Returns:
        Digest of ``weights.bin`` from ``digests.txt``; None if the package has no ``digests.txt``.

    Raises:
        PackageError: a file is missing or differs, or the package is not signed by the key. The message names
            the first such file and the next step.
    """
    names = [*manifest["sha256"], MANIFEST]
    try:
        digests = read_digests(folder) if _exists(folder / DIGESTS) else None
        if digests is not None and (missing := [name for name in names if name not in digests]):
            raise DamageError(f"{folder / DIGESTS} lacks {missing[0]}")
        # The signature's hashes replace the CRC-32s, so files are read only once.
        if key is not None:
            verify_signature(folder, names if digests is None else [*names, DIGESTS], key)
        elif digests is not None:
            verify_folder(folder, {name: digests[name] for name in names})
        else:
            _log.info("%s has no %s; comparing SHA-256s, which takes longer", folder, DIGESTS)
            for name, digest in manifest["sha256"].items():
                most = _weights_end(manifest) if name == WEIGHTS else _MAX_UNKNOWN_BYTES
                if sha256_of(folder / name, max_bytes=most) != digest:
                    raise DamageError(f"{folder / name} does not match its SHA-256")
        if read_regular(folder / LAYOUT, _MAX_BYTES) != layout_of(manifest).encode():
            raise DamageError(f"{folder / MANIFEST} does not match {LAYOUT}")
        for name in (EXPORTED, SHARED_EXPORTED) if manifest["shared"] else (EXPORTED,):
            # None in packages from earlier releases.
            saved_interface = extra_file(folder / name, INTERFACE, _MAX_BYTES)
            if saved_interface is not None and saved_interface != interface_of(manifest).encode():
                raise DamageError(f"{folder / MANIFEST} does not match the interface of {name}")
    except DamageError as error:
        raise PackageError(f"{error}. {_REMEDY}") from error
    except OSError as error:
        raise PackageError(f"{error.filename} cannot be read ({error.strerror}). {_REMEDY}") from error
    return None if digests is None else digests[WEIGHTS]


def _weights_end(manifest: Mapping[str, Any]) -> int:
    """Return the ``weights.bin`` size in bytes, according to the manifest."""
    if not manifest["weights"]:
        return 0
    # In file order, as ``_check_weights`` has verified.
    last = WeightRecord(**manifest["weights"][-1])
    end = last.offset + last.num_bytes
    return end + -end % ALIGNMENT


def _exists(path: Path) -> bool:
    # A dangling link counts as existing, so that reading it fails instead of skipping the verification.
    return path.is_symlink() or path.exists()


def _check_manifest(parsed: Any) -> None:
    """Raise DamageError if a parsed manifest field is missing or has an invalid value."""
    values = check_fields(parsed, "it", _FIELDS, _OPTIONAL)
    for name in ("torch", "isa", "operators"):
        _check_single_line(values[name], name)
    if not isinstance(values["compiled"], bool):
        raise DamageError("the field compiled must be true or false")
    features = [
        _check_single_line(feature, "a feature")
        for feature in check_names(values["features"], "the list of features")
    ]
    num_dense = check_integer(values["num_dense"], "the number of dense columns", high=1 << 31)
    check_string(values["outputs"], "the kind of outputs", allowed=("scores", "vectors"))
    inputs = [*features, *([DENSE] if num_dense else [])]
    for name in check_names(values["shared"], "the list of shared features"):
        check_string(name, "a shared feature", allowed=inputs)
    for name, rows in check_object(values["rows"], "the rows by feature").items():
        check_string(name, "a feature with rows", allowed=features)
        check_integer(rows, f"the rows of {name!r}")
    names = _check_weights(check_list(values["weights"], "the list of weights"))
    for name, data_type in check_object(values["quantised"], "the quantised weights").items():
        check_string(name, "a quantised weight", allowed=names)
        check_string(data_type, f"the data type of {name!r}")
    _check_hashed(check_object(values.get("hashed", {}), "the hashed weights"), names)
    for name in check_names(values.get("any_ids", []), "the list of features with any IDs"):
        check_string(name, "a feature with any IDs", allowed=features)
    if values["rounding"] is not None:
        check_string(values["rounding"], "the rounding")
    check_object(values["about"], "what it says about its run")
    _check_files(values)


def _check_weights(records: Sequence[Any]) -> list[str]:
    """Check that weight records are valid and contiguous, as `export` writes them, and return the weight
    names.
    """
    names, end = [], 0
    for record in records:
        values = check_fields(record, "a weight", WeightRecord._fields)
        name = _check_single_line(values["name"], "the name of a weight")
        check_string(values["dtype"], f"the dtype of {name!r}", allowed=tuple(_ITEM_SIZES))
        check_integers(values["shape"], f"the shape of {name!r}")
        offset = check_integer(values["offset"], f"the offset of {name!r}")
        # No gap except for the alignment, so every byte of the file belongs to a weight.
        if offset != end + -end % ALIGNMENT:
            raise DamageError(f"{name!r} is at {offset:,}, but the previous weight ends at {end:,}")
        end = check_integer(offset + WeightRecord(**values).num_bytes, f"the end of {name!r}")
        names.append(name)
    return check_names(names, "the list of weights")


def _check_hashed(hashed: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise DamageError if a hashed table has invalid parameters, or lacks tensors."""
    for name, values in hashed.items():
        if f"{name.removesuffix('weight')}starts" in names:
            raise PackageError(
                f"the keys of {name!r} have the format of an earlier release. Export the model again."
            )
        # The rows and the index of a hashed table are separate weights.
        for part in ("weight", *INDEX):
            check_string(f"{name.removesuffix('weight')}{part}", f"a part of {name[:80]!r}", allowed=names)
        formula = check_fields(values, f"the keys of {name!r}", _FORMULA)
        for part in ("seed", "max_rows", "dim", "first_seed"):
            check_integer(formula[part], f"the {part} of {name!r}")
        for part in ("low", "high"):
            if type(formula[part]) not in (int, float) or not math.isfinite(formula[part]):
                raise DamageError(f"the {part} of {name!r} is not a number")


def _check_files(values: Mapping[str, Any]) -> None:
    """Raise DamageError if a required file is not listed, or a listed name could leave the package folder."""
    files = check_object(values["sha256"], "the list of files")
    for name, digest in files.items():
        if Path(name).name != name or name in ("", ".", "..", MANIFEST, DIGESTS, SIGNATURE) or "\0" in name:
            raise DamageError(f"its list of files has {name!r}, which is not a file of the folder")
        if not _SHA256.fullmatch(check_string(digest, f"the SHA-256 of {name!r}")):
            raise DamageError(f"the SHA-256 of {name!r} is {digest[:80]!r}")
    # C++ needs the layout, and Python falls back to the exported program.
    needed = [LAYOUT, WEIGHTS, EXPORTED]
    needed += [SHARED_EXPORTED] if values["shared"] else []
    if values["compiled"]:
        needed += [COMPILED, *([SHARED] if values["shared"] else [])]
    if missing := [name for name in needed if name not in files]:
        raise DamageError(f"its list of files lacks {missing}")


def _check_single_line(value: Any, label: str) -> str:
    """Return a value from the manifest, which must be a string without line breaks.

    A string with line breaks could add lines to ``layout.txt``.
    """
    line = check_string(value, label)
    if "\n" in line or "\r" in line:
        raise DamageError(f"{label} contains a line break: {line[:80]!r}")
    return line
