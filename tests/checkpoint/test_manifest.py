import json
import sys
import zlib

import pytest
import torch

from meshrec.checkpoint.agreement import CheckpointError, DamagedCheckpointError
from meshrec.checkpoint.manifest import (
    DataFile,
    Manifest,
    StoredPiece,
    TensorRecord,
    entry_name,
    piece_identity,
)

PIECES = (
    StoredPiece((0, 0), (2, 4), 0, 16, 262144, (7,)),
    StoredPiece((2, 0), (3, 4), 0, 48, 262144, (0xFFFFFFFF,)),
)
TENSOR = {"__tensor__": "model.w"}


def manifest(**changes):
    values = {
        "step": 7,
        "world_size": 2,
        "files": (DataFile("data.safetensors", 96, 16, 5),),
        "tensors": {"model.w": TensorRecord("model", torch.float32, (5, 4), PIECES)},
        "values": {
            "epoch": {"kind": "plain", "content": 1},
            "model": {"kind": "module", "content": {"w": TENSOR}},
        },
        "plans": {"model": "{}"},
    }
    return Manifest(**{**values, **changes})


def test_bytes_and_back():
    for version in (1, 2):
        written = manifest(version=version)
        assert Manifest.from_bytes(written.to_bytes()) == written
    assert manifest().num_bytes == 96
    assert manifest().tensors["model.w"].num_bytes == 80
    assert [placed.piece for placed in manifest().contents[0]] == list(PIECES)


def test_every_flipped_byte_and_every_cut_is_seen():
    text = manifest().to_bytes()
    for place in range(len(text)):
        damaged = bytearray(text)
        damaged[place] ^= 1 << (place % 8)
        for wrong in (bytes(damaged), text[:place]):
            with pytest.raises(DamagedCheckpointError, match="checksum"):
                Manifest.from_bytes(wrong)


def signed(body):
    return body + f'\n{{"crc32": {zlib.crc32(body)}}}\n'.encode()


def changed(**changes):
    said = json.loads(manifest().to_bytes().split(b"\n")[0])
    for where, value in changes.items():
        *path, last = where.split("__")
        place = said
        for step in path:
            place = place[int(step) if step.isdigit() else step.replace("_", ".")]
        if isinstance(place, list):
            place[int(last)] = value
        else:
            place[last] = value
    return signed(json.dumps(said).encode())


@pytest.mark.parametrize("name", ["../data", "/etc/passwd", "..", "a/b", "a\0b", "", "x" * 300])
def test_no_name_leads_out_of_the_folder(name):
    with pytest.raises(DamagedCheckpointError, match="folder"):
        Manifest.from_bytes(changed(files=[[name, 96, 16, 5]]))


def test_half_of_a_surrogate_pair_is_damage():
    with pytest.raises(DamagedCheckpointError, match="surrogates"):
        Manifest.from_bytes(changed(files=[["\ud800", 96, 16, 5]]))


FIRST = "tensors__model_w__3__0"
SECOND = "tensors__model_w__3__1"
CRC = "0000ffff"


@pytest.mark.parametrize(
    ("where", "value", "flaw"),
    [
        ("step", 1.5, "step.*1.5"),
        ("step", 2**63, "step"),
        ("world_size", 0, "world_size.*0"),
        ("world_size", True, "world_size"),
        ("files", 3, "list.*3"),
        ("files__0__1", 2**64, "size"),
        ("files__0__2", 97, "97 bytes"),
        ("files__0__2", 8, "8 bytes"),
        ("files__0__1", 97, "bytes.*96"),
        ("files__0__1", 95, "'model.w'"),
        ("files__0__2", 20, "'model.w'.*byte 16.*20"),
        ("tensors", [], "tensors"),
        ("tensors__model_w__0", "epoch", "'epoch'"),
        ("tensors__model_w__1", "F31", "'model.w'.*'F31'"),
        ("tensors__model_w__1", "F64", "'model.w'.*262144 rows"),
        ("tensors__model_w__2", [5], "list.*1"),
        ("tensors__model_w__2", [6, 4], "20.*24"),
        ("tensors__model_w__2", [5, 2**61], "shape"),
        ("tensors__model_w__2", [5, -4], "'model.w'.*-4"),
        ("tensors__model_w__2", [1] * 65, "'model.w'.*65"),
        (f"{FIRST}__0", [3, 0], "overlap"),
        (f"{FIRST}__0", [4, 0], r"\[4, 0\].*\[5, 4\]"),
        (f"{FIRST}__0", [-1, 0], "'model.w'.*-1"),
        (f"{FIRST}__2", 1, "outside"),
        (f"{FIRST}__3", 2**63, "'model.w'"),
        (f"{FIRST}__3", 20, "byte 20.*16"),
        (f"{FIRST}__4", 0, "'model.w'.*0"),
        (f"{FIRST}__4", 1, "1 rows"),
        (f"{FIRST}__5", "", "0 checksums"),
        (f"{FIRST}__5", CRC * 2, "2 checksums"),
        (f"{FIRST}__5", "+000ffff", "hexadecimal"),
        (SECOND, [[0, 0], [2, 4], 0, 16, 262144, CRC], "16.*20"),
        ("tensors__model_w__3", [], "0.*20"),
        ("values", {}, "'model.w'.*'model'"),
        ("values__model__kind", "folder", "'model'.*'folder'"),
        ("values__model__content", {}, "'model.w'"),
        ("values__epoch__content", TENSOR, "'model.w'"),
        ("values__epoch__content", {"__tensor__": 3}, "name.*3"),
        ("values__epoch__content", {"__tuple__": "ab"}, "__tuple__"),
        ("values__epoch__content", {"__items__": [[1]]}, "something"),
        ("values__epoch__content", {"__set__": [{}]}, "unhashable"),
        ("plans", {"model": 1}, "plan.*1"),
        ("more", 1, "unknown"),
    ],
)
def test_what_a_right_checksum_does_not_excuse(where, value, flaw):
    with pytest.raises(DamagedCheckpointError, match=flaw):
        Manifest.from_bytes(changed(**{where: value}))


def test_a_file_and_a_name_stand_once():
    file = ["data.safetensors", 96, 16, 5]
    with pytest.raises(DamagedCheckpointError, match="twice"):
        Manifest.from_bytes(changed(files=[file, file]))
    body = manifest().to_bytes().split(b"\n")[0].replace(b'"step": 7', b'"step": 7, "step": 8')
    with pytest.raises(DamagedCheckpointError, match="object"):
        Manifest.from_bytes(signed(body))


@pytest.mark.parametrize("body", [b"[" * 100_000, b"1" * 5000, b"", b"[]", b"null", b"\xff"])
def test_what_is_no_object(body):
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json"):
        Manifest.from_bytes(signed(body))


def test_values_that_are_nested_too_deeply():
    content = 1
    for _ in range(sys.getrecursionlimit() - 100):  # torch.compile raises the limit
        content = [content]
    with pytest.raises(DamagedCheckpointError, match="recursion"):
        Manifest.from_bytes(changed(values__epoch__content=content))


@pytest.mark.parametrize("version", [3, 0, True, "2", None, 10**30])
def test_another_version_is_named(version):
    with pytest.raises(CheckpointError, match=r"'meshrec\.checkpoint'.*versions 1.*2"):
        Manifest.from_bytes(changed(version=version))


def test_names_of_pieces():
    assert entry_name("a", (0,), (3,), (3,)) == "a"
    assert entry_name("a", (0, 2), (3, 4), (5, 6)) == "a[0:3, 2:6]"


def test_every_part_of_a_place_counts():
    piece = PIECES[1]
    others = [
        piece_identity("b", torch.float32, (5, 4), piece),
        piece_identity("a", torch.int32, (5, 4), piece),
        piece_identity("a", torch.float32, (6, 4), piece),
        piece_identity("a", torch.float32, (5, 4), piece._replace(offset=(1, 0))),
        piece_identity("a", torch.float32, (5, 4), piece._replace(shape=(4, 3))),
        piece_identity("a", torch.float32, (5, 4), piece._replace(start=8)),
        piece_identity("a", torch.float32, (5, 4), piece._replace(rows_per_block=8)),
    ]
    assert len({piece_identity("a", torch.float32, (5, 4), piece), *others}) == 1 + len(others)


def test_values_that_are_too_long_are_not_written(monkeypatch):
    monkeypatch.setattr("meshrec.checkpoint.manifest.MAX_MANIFEST_BYTES", 300)
    with pytest.raises(ValueError, match="numbers"):
        manifest().to_bytes()
