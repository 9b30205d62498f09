import pytest

from meshrec.planner.sizes import size_text


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
