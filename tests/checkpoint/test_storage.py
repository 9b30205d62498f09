import pickle
import pickletools

import pytest
import torch

from meshrec.checkpoint import DamagedCheckpointError, load, read_manifest, save, verify_data


@pytest.fixture
def folder(tmp_path):
    generator = torch.Generator().manual_seed(0)
    save(tmp_path, {"a": torch.rand(100, 8, generator=generator), "b": [torch.arange(5)]})
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
        with pytest.raises(DamagedCheckpointError, match="is damaged"):
            verify_data(folder, read_manifest(folder))
        with pytest.raises(DamagedCheckpointError, match="is damaged"):
            load(folder, {"a": None, "b": None})
        path.write_bytes(whole)


def test_errors_name_tensor_and_rows(folder):
    record = read_manifest(folder).tensors["a"]
    flip(data_file(folder), record.pieces[0].begin)
    with pytest.raises(DamagedCheckpointError, match=r"data-.*, tensor 'a': rows from 0 on are not what was"):
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
