"""Package signatures, which prove who exported a package, and that no file has changed since.

``signature.txt`` has size and hash for every file, in a format that C++ also reads::

    meshrec-signature 1
    file 4194305 <tree hash, see meshrec.durable.tree_hash_of> weights.bin
    ed25519 <signature of everything before this line, 128 hexadecimal digits>

Keys have OpenSSL's format. ``openssl genpkey -algorithm ed25519 -out key.pem`` creates a private key, and
``openssl pkey -in key.pem -pubout -out key.pub`` writes the public key.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshrec.data.faults import needs
from meshrec.durable import DamageError, open_regular, read_regular, tree_hash_of, write_durably
from meshrec.export.archive import PackageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNATURE = "signature.txt"
_FIRST_LINE = "meshrec-signature 1"
_FILE_LINE = re.compile(r"file (0|[1-9]\d{0,18}) ([0-9a-f]{64}) ([^\r\n]+)")
_LAST_LINE = re.compile(rb"ed25519 ([0-9a-f]{128})\n")
# "ed25519 ", 64 bytes in hexadecimal, and the line break.
_LAST_LINE_BYTES = 8 + 128 + 1
# Limit on `signature.txt`, which is read before anything is verified.
_MAX_BYTES = 1 << 24


def read_private_key(path: str | Path) -> "Ed25519PrivateKey":
    """Read a private key to sign packages with.

    Args:
        path: PEM file with an ed25519 private key without password.

    Raises:
        ModuleNotFoundError: the cryptography package is missing.
        ValueError: the file cannot be read, or is not such a key.
    """
    serialization = needs("cryptography.hazmat.primitives.serialization", "sign")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        key = serialization.load_pem_private_key(Path(path).read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is not a private key without a password ({error}). Make one with "
            "`openssl genpkey -algorithm ed25519 -out key.pem`."
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(
            f"{path} is not an ed25519 key. Create one with "
            "`openssl genpkey -algorithm ed25519 -out key.pem`."
        )
    return key


def read_public_key(path: str | Path) -> "Ed25519PublicKey":
    """Read a public key to verify package signatures with.

    Raises:
        ModuleNotFoundError: the cryptography package is missing.
        ValueError: the file is unreadable or not such a key.
    """
    serialization = needs("cryptography.hazmat.primitives.serialization", "sign")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    advice = "Write it with `openssl pkey -in key.pem -pubout -out key.pub`."
    try:
        key = serialization.load_pem_public_key(Path(path).read_bytes())
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a public key ({error}). {advice}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError(f"{path} is not an ed25519 key. {advice}")
    return key


def sign_package(folder: str | Path, key: "Ed25519PrivateKey") -> None:
    """Sign all package files, and write ``signature.txt``.

    Args:
        folder: complete package.
        key: result of `read_private_key`.

    Raises:
        OSError: a file cannot be read, or the signature cannot be written.
    """
    folder = Path(folder)
    lines = [_FIRST_LINE]
    for path in sorted(folder.iterdir()):
        # Signing again replaces an earlier signature.
        if path.name != SIGNATURE:
            lines.append(f"file {_file_line(path)}")
    statement = ("\n".join(lines) + "\n").encode()
    signature = key.sign(statement).hex()
    write_durably(folder / SIGNATURE, statement + f"ed25519 {signature}\n".encode())


def verify_signature(folder: Path, names: Sequence[str], key: "Ed25519PublicKey") -> None:
    """Check that the files of a package are the files which the key owner signed.

    Args:
        folder: package folder.
        names: names of all files that will be used. Other signed files are not checked.
        key: result of `read_public_key`.

    Raises:
        PackageError: the package is not signed, is signed with another key, or a file differs from the signed
            file.
    """
    from cryptography.exceptions import InvalidSignature

    path = folder / SIGNATURE
    try:
        content = read_regular(path, _MAX_BYTES)
    except (OSError, DamageError) as error:
        raise PackageError(
            f"{folder} is not signed: {path} cannot be read ({error}), and a signature is required. "
            "Export the model with --sign KEY."
        ) from error
    statement, last = content[:-_LAST_LINE_BYTES], content[-_LAST_LINE_BYTES:]
    # The last line has a fixed length, so that the signed text is found without parsing it.
    match = _LAST_LINE.fullmatch(last)
    try:
        if match is None:
            raise InvalidSignature
        key.verify(bytes.fromhex(match[1].decode()), statement)
    except InvalidSignature as error:
        raise PackageError(
            f"{path} was not created with the private key of the required public key. Serve a package "
            "signed by its owner, or pass the owner's public key."
        ) from error
    signed = _parse(statement, path)
    for name in names:
        if name not in signed:
            raise PackageError(f"{path} does not sign {name}. Export the model again with --sign KEY.")
        try:
            _compare(folder / name, *signed[name])
        except (OSError, DamageError) as error:
            raise PackageError(
                f"{error}. Copy the package again from where it was exported, or export the model again."
            ) from error


def _file_line(path: Path) -> str:
    """Return "SIZE HASH NAME" for a file."""
    with open_regular(path) as descriptor:
        num_bytes = os.fstat(descriptor).st_size
        return f"{num_bytes} {tree_hash_of(descriptor, num_bytes, path.name)} {path.name}"


def _compare(path: Path, num_bytes: int, tree_hash: str) -> None:
    """Raise DamageError unless a file has the signed size and tree hash."""
    with open_regular(path) as descriptor:
        # Compared first, because hashing a huge sparse file takes very long.
        size = os.fstat(descriptor).st_size
        if size != num_bytes or tree_hash_of(descriptor, num_bytes, path.name) != tree_hash:
            raise DamageError(f"{path} differs from the signed file")


def _parse(statement: bytes, path: Path) -> dict[str, tuple[int, str]]:
    """Return the signed size in bytes and tree hash by file name, as stated in ``signature.txt``."""
    first, *lines = statement.decode(errors="replace").split("\n")
    matches = [_FILE_LINE.fullmatch(line) for line in lines[:-1]]
    if first != _FIRST_LINE or lines[-1:] != [""] or None in matches:
        raise PackageError(f"{path} has a format which this version does not read. Export the model again.")
    return {match[3]: (int(match[1]), match[2]) for match in matches if match is not None}
