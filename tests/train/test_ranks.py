import pytest
import torch

from meshrec.comms.launchers import launched
from meshrec.train.ranks import choose_device, join


def talk() -> tuple:
    ranks = join("cpu")
    values = (
        ranks.sum([ranks.rank, 2.5]),
        ranks.broadcast(f"from {ranks.rank}"),
        ranks.collect(ranks.rank),
    )
    ranks.wait_for_all()
    return values


def test_ranks_talk(ranks):
    assert ranks(2).run(talk) == [([1.0, 5.0], "from 0", [0, 1])] * 2


def test_one_process_is_enough():
    alone = join("cpu")
    assert not launched()
    assert alone.is_first
    assert (alone.sum([2.0]), alone.broadcast("x"), alone.collect(3)) == ([2.0], "x", [3])


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(None) == choose_device("cpu") == "cpu"
    with pytest.raises(ValueError, match=r"GPU.*--device"):
        choose_device("cuda")
    with pytest.raises(ValueError, match="--device"):
        choose_device("tpu")
