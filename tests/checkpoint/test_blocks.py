import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from meshrec.checkpoint import blocks
from meshrec.checkpoint.agreement import DamagedCheckpointError
from meshrec.checkpoint.blocks import FileWriter, StoredRows, grid_of, memory_of, read_region, write_rows

SHAPES = [(), (1,), (1000,), (100, 7), (3, 500), (20, 3, 5), (0, 4), (4, 0)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 256)


@pytest.fixture
def stored(tmp_path):
    descriptors = []

    def store(tensor, before=5, place=b"here"):
        path = tmp_path / "file"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        descriptors.append(descriptor)
        writer = FileWriter(descriptor)
        writer.write(bytes(before))
        with ThreadPoolExecutor(1) as pool:
            checksums = write_rows(writer, tensor, pool, place)
        assert path.stat().st_size == before + tensor.nbytes
        grid = grid_of(tensor.shape, tensor.dtype)
        return StoredRows(
            descriptor,
            before,
            tuple(tensor.shape),
            tensor.dtype,
            grid.rows_per_block,
            checksums,
            label="here",
            identity=place,
        )

    yield store
    for descriptor in descriptors:
        os.close(descriptor)


def values(shape, dtype=torch.float32):
    return torch.arange(max(1, torch.Size(shape).numel()), dtype=dtype)[: torch.Size(shape).numel()].view(
        shape
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_whole_tensors(stored, shape, dtype):
    tensor = values(shape, dtype)
    target = torch.full(shape, -1, dtype=dtype)
    read_region(stored(tensor), [0] * len(shape), target)
    assert torch.equal(target, tensor)


@pytest.mark.parametrize("rows", [(0, 100), (0, 9), (8, 11), (93, 100), (17, 64)])
@pytest.mark.parametrize("columns", [(0, 7), (2, 5)])
def test_regions(stored, rows, columns):
    tensor = values((100, 7))
    expected = tensor[slice(*rows), slice(*columns)]
    around = torch.full((rows[1] - rows[0] + 2, columns[1] - columns[0] + 2), -1.0)
    target = around[1:-1, 1:-1]
    read_region(stored(tensor), (rows[0], columns[0]), target)
    assert torch.equal(target, expected)
    assert (around == -1).sum() == around.numel() - expected.numel()
    in_place = torch.full(expected.shape, -1.0)
    read_region(stored(tensor), (rows[0], columns[0]), in_place)
    assert torch.equal(in_place, expected)


def test_other_types_are_converted(stored):
    target = torch.empty(10, 4, dtype=torch.float64)
    read_region(stored(values((10, 4))), (0, 0), target)
    assert torch.equal(target, values((10, 4), torch.float64))


def test_strided_tensors_are_written_in_order(stored):
    tensor = values((40, 10)).t()
    target = torch.empty(10, 40)
    read_region(stored(tensor), (0, 0), target)
    assert torch.equal(target, tensor)


def test_a_flipped_bit_is_found_in_its_block_only(stored):
    where = stored(values((100, 7)))
    position = 5 + 50 * 28 + 3
    byte = os.pread(where.descriptor, 1, position)[0]
    os.pwrite(where.descriptor, bytes([byte ^ 4]), position)
    read_region(where, (0, 0), torch.empty(40, 7))
    with pytest.raises(DamagedCheckpointError, match=r"here.*45"):
        read_region(where, (49, 0), torch.empty(1, 7))


def test_a_cut_file_is_found(stored):
    where = stored(values((100, 7)))
    os.truncate(where.descriptor, 300)
    with pytest.raises(DamagedCheckpointError, match="early"):
        read_region(where, (0, 0), torch.empty(100, 7))


def test_memory_is_the_tensors_own():
    tensor = torch.zeros(4, dtype=torch.uint8)
    memory_of(tensor)[2] = 7
    assert tensor.tolist() == [0, 0, 7, 0]
