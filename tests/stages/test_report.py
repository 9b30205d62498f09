import pytest
import torch
from torch import nn

from meshrec.stages import Staged, write_report
from meshrec.stages.report import report_data
from tests.browser import drawn, needs_browser


def chain():
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh())))


def test_the_page_says_what_the_last_batch_did():
    staged = Staged(chain(), cuts=["2"], split_size=4)
    with pytest.raises(ValueError, match="batch"):
        report_data(staged)
    staged(torch.rand(16, 8)).sum().backward()
    data = report_data(staged)
    assert data["num_splits"] == 4
    assert len(data["stages"]) == len(data["busy"]) == 2
    assert data["seconds"] > 0
    assert "backward, split 3" in data["timeline"]
    assert data["predicted"] is None  # nothing was chosen


@needs_browser
def test_a_browser_draws_it(tmp_path):
    staged = Staged(chain(), num_stages=2)
    staged(torch.rand(32, 8)).sum().backward()
    write_report(staged, tmp_path / "stages.html")
    page = drawn(f"file://{tmp_path}/stages.html").split("<noscript>")[0]
    assert "no cut is faster than" in page
    assert "What each stage computed when" in page
    assert "The predicted step by number of splits" in page
