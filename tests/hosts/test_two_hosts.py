"""`meshrec train` on two hosts gives what it gives on one, and says what is missing."""

import pytest

from tests.hosts.namespaces import hosts, needs_hosts
from tests.hosts.runs import alone, bits, by_hand, metrics, on_all

pytestmark = needs_hosts


def test_two_hosts_train_as_one_does(tmp_path):
    with hosts(2, tmp_path, rate="1gbit") as (*both, _):
        for code, printed in on_all(both, "--out", tmp_path / "shared"):
            assert code == 0, printed
    two, one = tmp_path / "shared" / "small-001", alone(tmp_path, 4)
    assert bits(two) == bits(one)
    assert metrics(two) == metrics(one)
    assert (two / "log_rank3.txt").is_file()


@pytest.mark.parametrize("keeps", [True, False])
def test_no_folder_is_shared(tmp_path, keeps):
    own = tmp_path / "own"
    options = ["--runs", own / "runs", *([] if keeps else ["--no-checkpoints"])]
    with hosts(2, tmp_path) as (*both, _):
        found = (by_hand if keeps else on_all)(both, *options, ranks=1)
    first, second = tmp_path / "host0" / "runs", tmp_path / "host1" / "runs"
    if keeps:
        for code, printed in found:
            assert code == 1
            assert "rank 1 on host1 cannot see" in printed
            assert "give a mounted folder (--out /mnt/shared/runs)" in printed
        assert not list(first.iterdir())  # what did not begin leaves nothing
        return
    assert [code for code, _ in found] == [0, 0], found
    assert (first / "small-001" / "summary.json").is_file()
    assert not (first / "small-001" / "checkpoints").exists()
    assert [path.name for path in second.iterdir()] == ["small-001.host1"]
    assert "rank 1 of 2" in (second / "small-001.host1" / "log_rank1.txt").read_text()
