from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from meshrec.checkpoint.data_file import TensorPart, Written, header, write_data_file


def write(path, parts):
    with ThreadPoolExecutor(1) as pool:
        return write_data_file(path, parts, pool)


def test_safetensors_reads_it(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    parts = [
        TensorPart("whole", (0, 0), (3, 2), torch.rand(3, 2)),
        TensorPart("piece", (2, 0), (5, 2), torch.rand(3, 2).bfloat16()),
        TensorPart("number", (), (), torch.tensor(4)),
        TensorPart("nothing", (3,), (3,), torch.empty(0)),
    ]
    written = write(tmp_path / "data.safetensors", parts)
    loaded = safetensors.load_file(tmp_path / "data.safetensors")
    assert set(loaded) == {"whole", "piece[2:5, 0:2]", "number", "nothing[3:3]"}
    assert all(
        torch.equal(loaded[name], part.tensor)
        for name, part in zip(["whole", "piece[2:5, 0:2]", "number"], parts, strict=False)
    )
    assert written.file.num_bytes == (tmp_path / "data.safetensors").stat().st_size
    assert written.file.header_bytes % 64 == 0
    assert Written.from_json(written.to_json()) == written


def test_a_failure_leaves_no_file(tmp_path):
    class Broken(ThreadPoolExecutor):
        def submit(self, *arguments):
            raise OSError(28, "No space left on device")

    with Broken(1) as pool, pytest.raises(OSError, match="space"):
        write_data_file(tmp_path / "data", [TensorPart("a", (0,), (3,), torch.rand(3))], pool)
    assert list(tmp_path.iterdir()) == []


def test_types_without_a_name_are_refused():
    with pytest.raises(ValueError, match=r"torch\.complex64"):
        header([TensorPart("a", (0,), (3,), torch.zeros(3, dtype=torch.complex64))])


def test_names_that_collide_with_those_of_pieces_are_refused():
    piece = TensorPart("a", (2,), (5,), torch.zeros(3))
    with pytest.raises(ValueError, match=r"'a\[2:5\]'"):
        header([piece, TensorPart("a[2:5]", (0,), (3,), torch.zeros(3))])
