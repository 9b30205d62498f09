import gzip
import random

import pytest

from meshrec.data import DataError
from meshrec.data.criteo_data import TextBlock, find_blocks, read_pieces
from meshrec.data.faults import Faults

TEXT = b"".join(b"line %d\n" % number for number in range(100))


def test_blocks_of_a_plain_file(tmp_path):
    file = tmp_path / "day"
    file.write_bytes(TEXT[:-1])  # the last line may lack its end
    blocks = find_blocks(file, Faults("raise"), size=200)
    assert len(blocks) > 3
    assert sum(block.lines for block in blocks) == 100
    texts = []
    for block in reversed(blocks):
        (piece,) = read_pieces(block, size=300)
        assert (piece.first_line, piece.lines) == (block.first_line, block.lines)
        assert piece.text.startswith(b"line %d" % block.first_line)
        texts.append(piece.text)
    assert b"".join(reversed(texts)) == TEXT[:-1]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_blocks_of_lines_of_drawn_lengths_are_read_once(tmp_path, suffix):
    draw = random.Random(0)
    lines = [b"%d %s\n" % (number, b"x" * draw.choice([0, 3, 40, 150])) for number in range(500)]
    file = tmp_path / f"day{suffix}"
    file.write_bytes(gzip.compress(b"".join(lines)) if suffix else b"".join(lines))
    for size in (7, 64, 200, 5000):
        at = 0
        for block in find_blocks(file, Faults("raise"), size=size):
            assert block.first_line == at
            for piece in read_pieces(block, size=size):
                assert piece.first_line == at
                assert piece.text == b"".join(lines[at : at + piece.lines])
                at += piece.lines
            assert at == block.first_line + block.lines
        assert at == 500


def test_a_gzipped_file_is_one_block(tmp_path):
    file = tmp_path / "day.gz"
    file.write_bytes(gzip.compress(TEXT))
    assert find_blocks(file, Faults("raise"), size=200) == [TextBlock(file, 0, 0, 100, len(TEXT))]
    pieces = list(read_pieces(TextBlock(file, 0, 0, 100, len(TEXT)), size=200))
    assert b"".join(piece.text for piece in pieces) == TEXT
    assert [piece.first_line for piece in pieces][:2] == [0, pieces[0].lines]


def test_long_lines_are_not_cut(tmp_path):
    file = tmp_path / "day"
    file.write_bytes(b"a" * 50 + b"\n" + b"b" * 50 + b"\n")
    assert [block.lines for block in find_blocks(file, Faults("raise"), size=10)] == [1, 1]


def test_damage_is_named_and_what_comes_before_can_be_read(tmp_path):
    file = tmp_path / "day.gz"
    text = b"".join(b"line %d\n" % (number * 7919) for number in range(20_000))
    file.write_bytes(gzip.compress(text)[:-2000])
    with pytest.raises(DataError, match=r"day\.gz is damaged after line \d+: "):
        find_blocks(file, Faults("raise"), size=1000)
    (block,) = find_blocks(file, Faults("skip"), size=1000)
    assert 0 < block.lines < 20_000
    assert sum(piece.lines for piece in read_pieces(block, size=1000)) == block.lines


def test_empty_files(tmp_path):
    (tmp_path / "day").touch()
    with pytest.raises(DataError, match="lines"):
        find_blocks(tmp_path / "day", Faults("raise"), size=10)
    assert find_blocks(tmp_path / "day", Faults("skip"), size=10) == []
