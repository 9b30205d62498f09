import pytest

from meshrec.compat.bridge import comm


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*comm._SIZES, *comm._RANKS):
        monkeypatch.delenv(name, raising=False)


def test_without_a_launcher_nodes_have_8_ranks_or_all():
    assert comm.get_local_size(16) == 8
    assert comm.get_local_size(6) == 6
    assert comm.get_local_rank(16, rank=11) == 3
    assert comm.get_group_rank(16, rank=11) == 1
    assert comm.get_num_groups(16) == 2


def test_the_launcher_knows(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert comm.get_local_size(8) == 4
    assert comm.get_local_size(6) == 6
    assert comm.get_local_rank(8, rank=2) == 1
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert comm.get_local_rank(8, rank=6) == 2


def test_the_device_is_what_there_is():
    assert comm.get_device_type() in ("cpu", "cuda")
