import os
import signal

from meshrec.train.ranks import join
from meshrec.train.stopping import EarlyStopping, StopRequest


def test_a_signal_stops_a_single_process():
    before = signal.getsignal(signal.SIGTERM)
    request, ranks = StopRequest(), join("cpu")
    with request.listening():
        assert not request.agreed(ranks).stop
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.agreed(ranks).stop
    assert signal.getsignal(signal.SIGTERM) is before


def fail_on_rank_one() -> list[bool]:
    ranks, request = join("cpu"), StopRequest()
    answers = [
        request.agreed(ranks, failed=ranks.rank == 1 and step == 1, at_once=step == 2).failed
        for step in range(3)
    ]
    answers.append(request.agreed(ranks, failed=ranks.rank == 1, at_once=True).failed)
    return answers


def stop_on_rank_one() -> list[bool]:
    ranks = join("cpu")
    request = StopRequest()
    answers = []
    for step in range(4):
        if step == 1 and ranks.rank == 1:
            request.signal = signal.SIGINT
        answers.append(request.agreed(ranks).stop)
    request.finish()
    return answers


def test_all_ranks_stop_at_the_same_step(ranks):
    assert ranks(2).run(stop_on_rank_one) == [[False, False, True, True]] * 2
    assert ranks(2).run(fail_on_rank_one) == [[False, False, True, True]] * 2


def test_patience():
    early = EarlyStopping(2)
    assert early.improves(0.6, 10)
    assert early.improves(0.7, 20)
    assert not early.improves(0.65, 30)
    assert not early.is_over
    again = EarlyStopping(2)
    again.load_state_dict(early.state_dict())
    assert not again.improves(0.69, 40)
    assert again.is_over
    assert (again.best_auc, again.best_step) == (0.7, 20)
    assert not EarlyStopping(None).is_over
