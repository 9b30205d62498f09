import pytest

from meshrec.plan.text import read_json, size_text


def test_an_object_is_read(tmp_path):
    (tmp_path / "a.json").write_text('{"a": 1}')
    assert read_json(tmp_path / "a.json", "a task file") == {"a": 1}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", r"a\.json.*JSON"),
        (b"\xff\xfe\x00", r"a\.json.*JSON.*'utf-8'"),
        (b"[1]", r"a\.json.*JSON"),
    ],
)
def test_other_files_are_named(tmp_path, content, said):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        read_json(tmp_path / "a.json", "a task file")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (2.5 * 2**20, "2.50 MiB"),
        (2**30, "1.00 GiB"),
        (2**41, "2,048.00 GiB"),
    ],
)
def test_the_unit_fits(num_bytes, text):
    assert size_text(num_bytes) == text
