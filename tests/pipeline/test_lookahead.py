"""Loaders that end, fail or write to their batches, and models that are called in between."""

import importlib.util
import logging
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshrec.comms.failures import CollectiveError
from meshrec.comms.mesh import default_env
from meshrec.distributed import ShardingEnv
from meshrec.ops import operators
from meshrec.optim import SGD
from meshrec.pipeline import TrainPipeline
from meshrec.testing import RankPool

# Ranks do not know the folder of tests.
_spec = importlib.util.spec_from_file_location("pipeline_models", Path(__file__).parent / "models.py")
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)


def pipelined(extra=None, update=None, **options):
    model, optimizer = models.sharded(spec=SGD(lr=0.1), extra=extra, update=update)
    return model, optimizer, TrainPipeline(model, optimizer, **options)


def assert_same_as_plain(model, optimizer, batches, extra=None, **options):
    other, its_optimizer = models.sharded(spec=SGD(lr=0.1), extra=extra)
    models.plain_loop(other, its_optimizer, batches, **options)
    models.assert_same(models.state_of(model, optimizer), models.state_of(other, its_optimizer))


def train_models_of_all_kinds():
    batches = models.make_batches(7)
    for extra in ("postprocessed", "twice", "branch"):
        model, optimizer, pipeline = pipelined(extra)
        assert len(list(pipeline(batches))) == len(batches)
        assert_same_as_plain(model, optimizer, batches, extra)


def test_models_may_do_what_they_like(ranks):
    ranks(2).run(train_models_of_all_kinds)


def name_what_stays_plain():
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("meshrec").addHandler(handler)
    try:
        list(pipelined("postprocessed")[2](models.make_batches(4)))
    finally:
        logging.getLogger("meshrec").removeHandler(handler)
    assert len(messages) == 1
    assert "collection: no part of the batch is the input" in messages[0]
    with pytest.raises(ValueError, match="collection"):
        list(pipelined("postprocessed", strict=True)[2](models.make_batches(4)))


def test_a_module_that_stays_plain_is_named_once(ranks):
    ranks(2).run(name_what_stays_plain)


def train_epochs():
    batches = models.make_batches(3)
    model, optimizer, pipeline = pipelined()
    for _ in range(3):
        assert len(list(pipeline(batches))) == 3
    iterator = iter(batches)
    for _ in batches:
        pipeline.progress(iterator)
    for _ in range(2):
        with pytest.raises(StopIteration):
            pipeline.progress(iterator)
    for number, _ in enumerate(pipeline(batches)):
        if number == 1:
            break
    assert_same_as_plain(model, optimizer, [*batches * 4, *batches[:2]])


def test_another_epoch_with_the_same_object(ranks):
    ranks(2).run(train_epochs)


def test_persistent_workers(monkeypatch):
    monkeypatch.setitem(sys.modules, "pipeline_models", models)  # batches are pickled
    loader = torch.utils.data.DataLoader(
        models.make_batches(4), batch_size=None, num_workers=1, persistent_workers=True
    )
    model, optimizer, pipeline = pipelined()
    for _ in range(2):
        assert len(list(pipeline(loader))) == 4
    assert_same_as_plain(model, optimizer, models.make_batches(4) * 2)


def end_unequally():
    rank = default_env().world.rank
    batches = models.make_batches(6)
    own = batches if rank == 0 else batches[:4]
    model, optimizer, pipeline = pipelined(accumulate=3)
    assert len(list(pipeline(own))) == 4
    assert_same_as_plain(model, optimizer, batches[:4], accumulate=3)
    pipeline = pipelined(uneven="error")[2]
    outputs = []
    with pytest.raises(ValueError, match=r"rank 1.*2"):
        outputs.extend(pipeline(own))


def test_unequal_numbers_of_batches(ranks):
    ranks(2).run(end_unequally)


def stop_one_rank():
    rank = default_env().world.rank
    group = dist.new_group(timeout=timedelta(seconds=2))
    env = ShardingEnv.from_process_group(group, device_type="cpu")
    model, optimizer = models.sharded(spec=SGD(lr=0.1), env=env)
    pipeline, iterator = TrainPipeline(model, optimizer), iter(models.make_batches(6))
    for _ in range(2):
        pipeline.progress(iterator)
    dist.barrier()
    if rank == 0:
        with pytest.raises(CollectiveError, match="rank 1"):
            pipeline.progress(iterator)
    dist.barrier()


def test_a_rank_that_stops_early_is_named():
    # Ranks of its own: afterwards, one of them has started a collective more than the other.
    with RankPool(2) as pool:
        pool.run(stop_one_rank)


def fail_in_the_loader():
    rank = default_env().world.rank
    batches = models.make_batches(5)

    def loader():
        yield from batches[:3]
        if rank == 1:
            raise OSError("the disk is gone")
        yield from batches[3:]

    model, optimizer, pipeline = pipelined()
    iterator = loader()
    for _ in range(3):
        pipeline.progress(iterator)
    with pytest.raises(RuntimeError, match=r"rank 1.*OSError"):
        pipeline.progress(iterator)
    assert_same_as_plain(model, optimizer, batches[:3])
    assert len(list(pipeline(batches))) == 5


def test_an_error_of_the_loader_comes_in_its_turn(ranks):
    ranks(2).run(fail_in_the_loader)


def fail_on_bad_ids():
    batches = models.make_batches(5)
    if default_env().world.rank == 0:
        batches[2].parts[0].values()[-1] = 1000
    model, optimizer, pipeline = pipelined()
    iterator = iter(batches)
    for _ in range(2):
        pipeline.progress(iterator)
    with pytest.raises(ValueError, match=r"rank 0.*id 1000"):
        pipeline.progress(iterator)
    for _ in range(2):
        pipeline.progress(iterator)
    assert_same_as_plain(model, optimizer, batches[:2] + batches[3:])


def test_bad_ids_come_in_their_turn(ranks):
    ranks(2).run(fail_on_bad_ids)


def fail_in_the_kernel(error):
    batches = models.make_batches(5)
    route_ids, bad_id = operators.route_ids, 1000

    def fail_on_the_bad_id(values, *arguments):
        if bad_id in values:
            raise error
        return route_ids(values, *arguments)

    model, optimizer, pipeline = pipelined()
    iterator = iter(batches)
    with pytest.MonkeyPatch.context() as patch:
        if default_env().world.rank == 1:
            batches[2].parts[0].values()[-1] = bad_id
            patch.setattr(operators, "route_ids", fail_on_the_bad_id)
        for _ in range(2):
            pipeline.progress(iterator)
        with pytest.raises((ValueError, RuntimeError, MemoryError)) as failure:
            pipeline.progress(iterator)
        for _ in range(2):
            pipeline.progress(iterator)
    assert_same_as_plain(model, optimizer, batches[:2] + batches[3:])
    return type(failure.value), str(failure.value)


@pytest.mark.parametrize("error", [ValueError("no"), RuntimeError("no"), MemoryError("no")])
def test_an_error_of_one_ranks_kernel_comes_in_its_turn_on_all(ranks, error):
    kind, text = type(error), "rank 1: " + ("RuntimeError: no" if type(error) is RuntimeError else "no")
    assert ranks(2).run(fail_in_the_kernel, error) == [(kind, text)] * 2


def write_to_batches():
    rank = default_env().world.rank
    batches = models.make_batches(6)

    def loader():
        for number, batch in enumerate(batches):
            if number == 3 and rank == 1:
                batches[2].dense.add_(1.0)
            yield batch

    model, optimizer, pipeline = pipelined()
    iterator = loader()
    for _ in range(2):
        pipeline.progress(iterator)
    with pytest.raises(ValueError, match=r"rank 1.*batch\.dense"):
        pipeline.progress(iterator)
    assert_same_as_plain(model, optimizer, batches[:2])
    pipeline.reset()
    batches = models.make_batches(6)
    model, optimizer, pipeline = pipelined()
    iterator = iter(batches)
    pipeline.progress(iterator)
    batches[1].parts[0].values().zero_()
    pipeline.progress(iterator)  # the first two batches are not looked up ahead
    before = models.state_of(model, optimizer)
    if rank == 1:  # between steps, and on one rank alone
        batches[2].parts[0].values().zero_()
    with pytest.raises(ValueError, match=r"rank 1.*batch\.parts\[0\]") as caught:
        pipeline.progress(iterator)
    assert "rank 0" not in str(caught.value)
    models.assert_same(models.state_of(model, optimizer), before)
    for _ in range(3):
        pipeline.progress(iterator)
    assert_same_as_plain(model, optimizer, batches[:2] + batches[3:])


def write_in_the_forward_pass():
    batches = models.make_batches(4)

    def forward(batch):
        batch.dense.mul_(0.5)  # as in the plain loop
        return model(batch)

    model, optimizer = models.sharded(spec=SGD(lr=0.1))
    assert len(list(TrainPipeline(model, optimizer, forward=forward)(batches))) == 4
    # They are halves by now.
    assert_same_as_plain(model, optimizer, batches)

    def forward_ids(batch):
        batch.parts[0].values().zero_()
        return model(batch)

    with pytest.raises(ValueError, match=r"batch\.parts\[0\]"):
        list(TrainPipeline(model, optimizer, forward=forward_ids)(batches))


def test_what_the_forward_pass_writes(ranks):
    ranks(2).run(write_in_the_forward_pass)


def test_a_batch_that_is_written_to(ranks):
    ranks(2).run(write_to_batches)


def do_other_things_in_between():
    batches = models.make_batches(8)
    model, optimizer, pipeline = pipelined()
    other, its_optimizer = models.sharded(spec=SGD(lr=0.1))
    iterator = iter(batches)
    for number, batch in enumerate(batches):
        if number == 2:
            with torch.no_grad():  # the very batch that is in flight
                assert torch.equal(model(batch)[1], other(batch)[1])
        if number == 3:
            # Both lose their step.
            for each in (model, other):
                each.eval()
            assert torch.equal(pipeline.progress(iterator), other(batch)[1])
            for each in (model, other):
                each.train()
            continue
        if number == 5:
            for each in (model, other):  # an update that the pipeline does not make
                each(batches[0])[0].sum().backward()
        if number == 6:
            for each in (model, other):
                state = {
                    name: (value.full_tensor() if hasattr(value, "full_tensor") else value) * 0.5
                    for name, value in each.state_dict().items()
                }
                each.load_state_dict(state)
        output = pipeline.progress(iterator)
        assert torch.equal(output, models.plain_loop(other, its_optimizer, [batch])[0])
    models.assert_same(models.state_of(model, optimizer), models.state_of(other, its_optimizer))


def test_what_happens_between_steps(ranks):
    ranks(2).run(do_other_things_in_between)


def test_wrong_options():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"accumulate.*1.*0"):
        TrainPipeline(model, optimizer, accumulate=0)
    with pytest.raises(ValueError, match=r"'stop'.*'error'.*'wait'"):
        TrainPipeline(model, optimizer, uneven="wait")


def test_one_process_without_tables():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def forward(batch):
        output = model(batch["x"])
        return output.sum(), output.detach()

    pipeline = TrainPipeline(model, optimizer, torch.device("cpu"), forward=forward)
    batches = [{"x": torch.full((3, 2), float(number))} for number in range(4)]
    assert [output.shape for output in pipeline(batches)] == [(3, 1)] * 4
