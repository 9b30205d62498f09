"""Signatures of packages: what was signed is what is used."""

import shutil
import sys

import pytest

pytest.importorskip("cryptography", reason="needs the extra sign")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from meshrec.durable import write_digests
from meshrec.export import PackageError, Predictor, check_package, export, read_private_key, sign_package
from meshrec.export.signing import read_public_key
from tests.export.conftest import FEATURES, NUM_DENSE, torchs_own_warnings


def write_key(folder, name, key=None, password=None):
    """Write a pair of keys, as OpenSSL does; return the paths of both."""
    key = key or Ed25519PrivateKey.generate()
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private.write_bytes(key.private_bytes(pem, pkcs8, encryption))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return write_key(tmp_path_factory.mktemp("keys"), "ours")


@pytest.fixture
def signed(uncompiled, tmp_path, keys):
    shutil.copytree(uncompiled, tmp_path / "package")
    sign_package(tmp_path / "package", read_private_key(keys[0]))
    return tmp_path / "package"


def test_a_signed_package_opens_with_and_without_its_key(signed, keys):
    with torchs_own_warnings():
        assert Predictor(signed, public_key=keys[1]).version == Predictor(signed).version


def test_export_signs(model, tmp_path, keys):
    with torchs_own_warnings():
        export(
            model,
            tmp_path / "new",
            features=FEATURES,
            num_dense=NUM_DENSE,
            compile=False,
            torchscript=True,
            sign=keys[0],
        )
    check_package(tmp_path / "new", public_key=keys[1])
    assert "torchscript.pt" in (tmp_path / "new" / "signature.txt").read_text()


def test_every_file_is_signed(signed, keys):
    """Whoever changes a file and writes new checksums is found; a signature is not one of the files."""
    for path in sorted(signed.iterdir()):
        content = path.read_bytes()
        for place in {0, len(content) // 2, len(content) - 1}:
            changed = bytearray(content)
            changed[place] ^= 1
            path.write_bytes(changed)
            if path.name not in ("signature.txt", "digests.txt"):
                write_digests(signed)
                (signed / "digests.txt").write_bytes(
                    b"".join(
                        line
                        for line in (signed / "digests.txt").read_bytes().splitlines(keepends=True)
                        if not line.endswith(b" signature.txt\n")
                    )
                )
            with pytest.raises(PackageError, match=r"again|signed"):
                check_package(signed, public_key=keys[1])
            path.write_bytes(content)
    shutil.rmtree(signed)


def test_what_is_not_signed_by_the_key_is_refused(signed, uncompiled, keys, tmp_path):
    _, other = write_key(tmp_path, "other")
    with pytest.raises(PackageError, match="private"):
        check_package(signed, public_key=other)
    with pytest.raises(PackageError, match="--sign"):
        check_package(uncompiled, public_key=keys[1])
    (signed / "added.bin").write_bytes(b"")  # nothing uses it
    check_package(signed, public_key=keys[1])
    with (signed / "weights.bin").open("r+b") as file:
        file.truncate(1 << 42)  # reading it would take hours
    with pytest.raises(PackageError, match=r"weights.bin"):
        check_package(signed, public_key=keys[1])


def test_a_signature_of_other_files_is_refused(signed, keys, tmp_path):
    shutil.copytree(signed, tmp_path / "fewer")
    (tmp_path / "fewer" / "exported.pt2").unlink()
    sign_package(tmp_path / "fewer", read_private_key(keys[0]))
    shutil.copy(tmp_path / "fewer" / "signature.txt", signed)
    with pytest.raises(PackageError, match=r"exported.pt2"):
        check_package(signed, public_key=keys[1])
    for end in (b"", b"ed25519 00\n", b"\xff" * 300):
        (signed / "signature.txt").write_bytes(end)
        with pytest.raises(PackageError, match="private"):
            check_package(signed, public_key=keys[1])


def test_bad_keys_are_named(uncompiled, tmp_path, keys):
    encrypted, _ = write_key(tmp_path, "encrypted", password=b"secret")
    other_kind, other_kind_public = write_key(tmp_path, "rsa", rsa.generate_private_key(65537, 2048))
    for path in (encrypted, keys[1], tmp_path / "missing"):
        with pytest.raises(ValueError, match="password"):
            read_private_key(path)
    for path in (keys[0], tmp_path / "missing"):
        with pytest.raises(ValueError, match="public"):
            read_public_key(path)
    for read, path in ((read_private_key, other_kind), (read_public_key, other_kind_public)):
        with pytest.raises(ValueError, match="ed25519"):
            read(path)
    with pytest.raises(ValueError, match="signature"):
        check_package(uncompiled, verify=False, public_key=keys[1])


def test_a_missing_library_is_named(uncompiled, keys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for name in [name for name in sys.modules if name.startswith("cryptography.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ModuleNotFoundError, match=r"\[sign\]"):
        check_package(uncompiled, public_key=keys[1])
