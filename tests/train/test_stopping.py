import os
import signal

import torch

from meshrec.train.ranks import join
from meshrec.train.stopping import EarlyStopping, PairedTest, StopRequest


def test_a_signal_stops_a_single_process():
    before = signal.getsignal(signal.SIGTERM)
    request, ranks = StopRequest(), join("cpu")
    with request.listening():
        assert not request.exchange(ranks).stop
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.exchange(ranks).stop
    assert signal.getsignal(signal.SIGTERM) is before


def fail_on_rank_one() -> list[bool]:
    ranks, request = join("cpu"), StopRequest()
    answers = [
        request.exchange(ranks, failed=ranks.rank == 1 and step == 1, at_once=step == 2).failed
        for step in range(3)
    ]
    answers.append(request.exchange(ranks, failed=ranks.rank == 1, at_once=True).failed)
    return answers


def stop_on_rank_one() -> list[bool]:
    ranks = join("cpu")
    request = StopRequest()
    answers = []
    for step in range(4):
        if step == 1 and ranks.rank == 1:
            request.signal = signal.SIGINT
        answers.append(request.exchange(ranks).stop)
    request.finish()
    return answers


def test_all_ranks_stop_at_the_same_step(ranks):
    assert ranks(2).run(stop_on_rank_one) == [[False, False, True, True]] * 2
    assert ranks(2).run(fail_on_rank_one) == [[False, False, True, True]] * 2


def test_patience():
    early = EarlyStopping(2)
    assert early.record(0.6, 10)
    assert early.record(0.7, 20)
    assert not early.record(0.65, 30)
    assert not early.is_over
    again = EarlyStopping(2)
    again.load_state_dict(early.state_dict())
    assert not again.record(0.69, 40)
    assert again.is_over
    assert (again.best_auc, again.best_step) == (0.7, 20)
    assert not EarlyStopping(None).is_over


def first() -> torch.Tensor:
    return 1 + torch.rand(400, generator=torch.Generator().manual_seed(0))


def losses(gain: float, seed: int) -> torch.Tensor:
    """Return losses of 400 samples, lower than the first ones by ``gain`` standard errors."""
    noise = torch.randn(400, generator=torch.Generator().manual_seed(seed))
    noise = (noise - noise.mean()) / noise.std(correction=0)
    return first() - 0.01 * (noise + gain / 20)


def after(*gains: float, patience: int | None = 3) -> PairedTest:
    test = PairedTest(patience)
    test.add(first(), None, 0)
    for number, gain in enumerate(gains, 1):
        test.add(losses(gain, number), None, 10 * number)
    return test


def test_losses_that_do_not_fall_end_the_run():
    assert not after(0.5, -1.0).is_over
    assert after(0.5, -1.0, 0.9).is_over
    assert after(0.5, -1.0, 0.9).step == 0
    assert not after(0.5, -1.0, 0.9, patience=4).is_over
    assert not after(0.5, -1.0, 0.9, patience=None).is_over


def test_a_loss_that_may_be_falling_earns_more_time():
    assert not after(0.0, 0.0, 1.5).is_over
    assert not after(0.0, 0.0, 1.5, 0.0, 0.0).is_over
    assert after(0.0, 0.0, 1.5, 0.0, 0.0, 0.0).is_over


def test_a_loss_that_fell_by_more_than_chance_is_the_next_reference():
    test = after(0.0, 0.0, 2.5)
    assert (test.step, test.num_evaluations, test.is_over) == (30, 0, False)


def test_samples_without_weight_do_not_count():
    test, weights = PairedTest(1), torch.tensor([1.0, 1.0, 1.0, 0.0])
    test.add(torch.tensor([1.0, 1.0, 1.0, 9.0]), weights, 0)
    test.add(torch.tensor([1.1, 1.0, 1.1, 0.0]), weights, 1)
    assert test.is_over


def test_the_reference_outlives_a_checkpoint():
    early, again = EarlyStopping(None, 2), EarlyStopping(None, 2)
    early.test.add(torch.ones(5), None, 0)
    early.test.add(torch.full((5,), 1.1) + 0.1 * torch.arange(5), None, 4)
    again.load_state_dict(early.state_dict())
    assert again.test.num_samples == 5
    again.test.add(torch.full((5,), 1.2) + 0.1 * torch.arange(5), None, 8)
    assert again.is_over
    assert "below that of step 0 by more than chance (paired test of 5 samples)" in again.reason("AUC")


def test_a_perfect_metric_ends_the_run_only_with_the_test():
    for patience in (None, 2):
        early = EarlyStopping(None, patience)
        early.record(1.0, 7)
        assert early.is_over == (patience is not None)
    assert early.reason("AUC") == "the validation AUC of step 7 leaves nothing to improve."


def test_the_reason_of_patience():
    early = EarlyStopping(1)
    early.record(0.7, 20)
    assert early.reason("NDCG@10") is None
    early.record(0.6, 30)
    assert early.reason("NDCG@10") == "1 evaluation in a row had no better validation NDCG@10 than step 20."
