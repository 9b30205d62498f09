import errno
import json
import os
import pickle
import pickletools
import zlib

import pytest
import torch

from meshrec.checkpoint import (
    CheckpointError,
    DamagedCheckpointError,
    load,
    read_manifest,
    save,
    verify_data,
)
from meshrec.checkpoint.blocks import read_region
from meshrec.checkpoint.manifest import MANIFEST
from meshrec.checkpoint.reading import open_data, stored_rows


@pytest.fixture
def folder(tmp_path):
    generator = torch.Generator().manual_seed(0)
    save(
        tmp_path,
        {"a": torch.rand(100, 8, generator=generator), "b": [torch.arange(5)], "c": torch.rand(100, 8)},
    )
    return tmp_path


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def data_file(folder):
    return next(folder.glob("data-*.safetensors"))


def test_every_byte_is_verified(folder):
    verify_data(folder, read_manifest(folder))
    path = data_file(folder)
    whole = path.read_bytes()
    for place in (0, 8, 100, len(whole) // 2, len(whole) - 1):
        flip(path, place)
        with pytest.raises(DamagedCheckpointError, match="damaged"):
            verify_data(folder, read_manifest(folder))
        with pytest.raises(DamagedCheckpointError, match="damaged"):
            load(folder, {"a": None, "b": None})
        path.write_bytes(whole)


def test_errors_name_tensor_and_rows(folder):
    record = read_manifest(folder).tensors["a"]
    flip(data_file(folder), record.pieces[0].start)
    with pytest.raises(DamagedCheckpointError, match=r"'a'.*0"):
        load(folder, {"a": None})


def test_there_is_no_pickle(folder):
    for path in folder.iterdir():
        with pytest.raises((ValueError, pickle.UnpicklingError)):
            list(pickletools.genops(path.read_bytes()))


def replicated(folder):
    save(folder, {"a": torch.ones(3), "b": torch.ones(4)})
    manifest = read_manifest(folder)
    return [len(manifest.tensors[name].pieces) for name in "ab"], {
        manifest.tensors[name].pieces[0].file for name in "ab"
    }


def test_replicas_are_written_once_by_ranks_in_turn(ranks, tmp_path):
    pieces, files = ranks(2).run(replicated, tmp_path)[0]
    assert pieces == [1, 1]
    assert files == {0, 1}


def reseal(folder, change):
    """Change the manifest, and give it a right checksum."""
    path = folder / MANIFEST
    said = json.loads(path.read_bytes().split(b"\n")[0])
    change(said)
    body = json.dumps(said).encode()
    path.write_bytes(body + f'\n{{"crc32": {zlib.crc32(body)}}}\n'.encode())


def test_files_must_be_there_with_their_sizes(folder):
    path = data_file(folder)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(DamagedCheckpointError, match=rf"{path.name} has [\d,]+ bytes instead of"):
        read_manifest(folder)
    path.unlink()
    with pytest.raises(DamagedCheckpointError, match=f"{path.name}"):
        read_manifest(folder)
    path.write_bytes(whole)
    (folder / MANIFEST).unlink()
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json"):
        read_manifest(folder)


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a device", "symbolic"])
@pytest.mark.parametrize("name", ["manifest", "data"])
def test_only_regular_files_are_read(folder, kind, name):
    path = data_file(folder) if name == "data" else folder / MANIFEST
    path.unlink()
    match kind:
        case "a pipe":
            os.mkfifo(path)
        case "a folder":
            path.mkdir()
        case "a device":
            path.symlink_to("/dev/zero")
        case _:
            path.symlink_to(path)
    with pytest.raises(DamagedCheckpointError, match=kind):
        read_manifest(folder)


def test_a_file_that_the_user_may_not_read_is_not_damaged(folder, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match=r"manifest\.json") as caught:
        read_manifest(folder)
    assert not isinstance(caught.value, DamagedCheckpointError)


def exchange(said):
    a, c = said["tensors"]["a"][3], said["tensors"]["c"][3]
    a[:], c[:] = c[:], a[:]


CHANGES = {
    "another type": lambda said: said["tensors"]["a"].__setitem__(1, "I32"),
    "another tensor's bytes": exchange,
    "a longer file": lambda said: said["files"][0].__setitem__(1, said["files"][0][1] + 1),
    "another header": lambda said: said["files"][0].__setitem__(3, 5),
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_the_header_of_a_file_says_what_lies_where(folder, version, change):
    """Also in checkpoints of the first version, whose checksums cover the bytes alone."""

    def both(said):
        said["version"] = version
        CHANGES[change](said)

    reseal(folder, both)
    with pytest.raises(DamagedCheckpointError, match="damaged"):
        read_manifest(folder)


def test_the_checksum_of_a_block_covers_its_place(folder):
    manifest = read_manifest(folder)
    record = manifest.tensors["a"]
    piece = record.pieces[0]
    with open_data(folder, manifest, piece.file) as descriptor:
        sound = stored_rows(folder, manifest, descriptor, "a", record=record, piece=piece)
        read_region(sound, (0, 0), torch.empty(100, 8))
        for name, other in [
            ("c", record),
            ("a", record._replace(dtype=torch.int32)),
            ("a", record._replace(shape=(200, 8))),
        ]:
            stored = stored_rows(folder, manifest, descriptor, name, record=other, piece=piece)
            with pytest.raises(DamagedCheckpointError, match="checksums"):
                read_region(stored, (0, 0), torch.empty(100, 8))
