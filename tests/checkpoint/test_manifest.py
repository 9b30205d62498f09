import json
import zlib

import pytest
import torch

from meshrec.checkpoint.agreement import DamagedCheckpointError
from meshrec.checkpoint.manifest import (
    MANIFEST,
    DataFile,
    Manifest,
    StoredPiece,
    TensorRecord,
    read_manifest,
)


def manifest(**changes):
    piece = StoredPiece((2, 0), (3, 4), 0, 8, 2, (1, 0xFFFFFFFF))
    values = {
        "step": 7,
        "world_size": 2,
        "files": (DataFile("data.safetensors", 100, 8, 5),),
        "tensors": {"model.w": TensorRecord("model", torch.float32, (5, 4), (piece,))},
        "values": {"epoch": {"kind": "plain", "content": 1}},
        "plans": {"model": "{}"},
    }
    return Manifest(**{**values, **changes})


def test_bytes_and_back():
    assert Manifest.from_bytes(manifest().to_bytes()) == manifest()
    assert manifest().num_bytes == 100
    assert manifest().tensors["model.w"].num_bytes == 80


def test_every_flipped_byte_and_every_cut_is_seen():
    text = manifest().to_bytes()
    for place in range(len(text)):
        damaged = bytearray(text)
        damaged[place] ^= 1 << (place % 8)
        for wrong in (bytes(damaged), text[:place]):
            with pytest.raises(DamagedCheckpointError, match="does not have the checksum"):
                Manifest.from_bytes(wrong)


def signed(data):
    body = json.dumps(data).encode()
    return body + f'\n{{"crc32": {zlib.crc32(body)}}}\n'.encode()


def changed(key, value):
    data = json.loads(manifest().to_bytes().split(b"\n")[0])
    data[key] = value
    return signed(data)


@pytest.mark.parametrize("name", ["../data", "/etc/passwd", "..", "a/b"])
def test_no_name_leads_out_of_the_folder(name):
    with pytest.raises(DamagedCheckpointError, match="a file outside of its folder"):
        Manifest.from_bytes(changed("files", [[name, 100, 8, 5]]))


@pytest.mark.parametrize(
    "piece",
    [
        [[3, 0], [3, 4], 0, 8, 2, "0" * 16],
        [[-1, 0], [3, 4], 0, 8, 2, "0" * 16],
        [[0], [3], 0, 8, 2, "0" * 16],
        [[2, 0], [3, 4], 1, 8, 2, "0" * 16],
        [[2, 0], [3, 4], 0, 60, 2, "0" * 16],
        [[2, 0], [3, 4], 0, -8, 2, "0" * 16],
    ],
)
def test_no_piece_leads_out_of_its_file_or_tensor(piece):
    with pytest.raises(DamagedCheckpointError, match=r"places 'model\.w' outside of its file or tensor"):
        Manifest.from_bytes(changed("tensors", {"model.w": ["model", "F32", [5, 4], [piece]]}))


@pytest.mark.parametrize("checksums", [[1, "0" * 16], [2, "0" * 8], [0, ""], [3, ""]])
def test_no_block_is_without_a_checksum(checksums):
    piece = [[2, 0], [3, 4], 0, 8, *checksums]
    with pytest.raises(DamagedCheckpointError, match=r"lacks checksums of 'model\.w'"):
        Manifest.from_bytes(changed("tensors", {"model.w": ["model", "F32", [5, 4], [piece]]}))


def test_another_version_is_named():
    with pytest.raises(ValueError, match=r"of version 2, and 'meshrec\.checkpoint' of version 1"):
        Manifest.from_bytes(changed("version", 2))


def test_files_must_be_there_with_their_sizes(tmp_path):
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json is missing: it was not finished"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_bytes(manifest().to_bytes())
    with pytest.raises(DamagedCheckpointError, match=r"data\.safetensors is missing"):
        read_manifest(tmp_path)
    (tmp_path / "data.safetensors").write_bytes(bytes(99))
    with pytest.raises(DamagedCheckpointError, match=r"data\.safetensors has 99 bytes instead of 100"):
        read_manifest(tmp_path)
    (tmp_path / "data.safetensors").write_bytes(bytes(100))
    assert read_manifest(tmp_path) == manifest()
