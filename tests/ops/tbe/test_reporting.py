import logging

import torch
from torch.library import opcheck

from meshrec.ops.tbe import reporting  # noqa: F401 - registers the op

OPS = torch.ops.meshrec_host
NAMES = torch.frombuffer(bytearray(b"t0\ta\nt1\tb\n"), dtype=torch.uint8)


def test_it_counts_and_speaks_once(caplog):
    total = torch.zeros((), dtype=torch.int64)
    with caplog.at_level(logging.WARNING, logger="meshrec"):
        for counts in ([0, 0], [1, 2], [5, 0]):
            OPS.report_clamped(total, torch.tensor(counts), NAMES)
    assert total.item() == 8
    assert len(caplog.messages) == 1
    assert "3 IDs lie outside their table, most of them in feature 'b' for table 't1'" in caplog.text


def test_opcheck():
    total, counts = torch.zeros((), dtype=torch.int64), torch.tensor([0, 2])
    opcheck(OPS.report_clamped.default, (total, counts, NAMES))
