import pytest
import torch

from meshrec.metrics.windowed import WindowedSum


def test_windows_begin_anew_and_lifetimes_go_on():
    sums = WindowedSum(2, torch.device("cpu"), None)
    for expected_lifetime in (1.0, 2.0):
        sums.window[0] += 1
        window, lifetime = sums.take()
        assert (window.tolist(), lifetime.tolist()) == ([1.0, 0.0], [expected_lifetime, 0.0])
    other = WindowedSum(2, torch.device("cpu"), None)
    other.window[1] += 5
    other.load_state_dict(sums.state_dict())
    assert other.take().lifetime.tolist() == [2.0, 0.0]
    with pytest.raises(ValueError, match=r"2 sums.*3"):
        WindowedSum(3, torch.device("cpu"), None).load_state_dict(sums.state_dict())
