import importlib.util
from pathlib import Path

import pytest
import torch

from meshrec.compat.bridge.staged_pipeline import PipelineStage, SparseDataDistUtil, StagedTrainPipeline
from meshrec.optim import SGD

# Ranks do not know the folder of tests.
_file = Path(__file__).parents[2] / "pipeline" / "models.py"
_spec = importlib.util.spec_from_file_location("pipeline_models", _file)
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)


def stages(seen):
    def stage(name):
        def run(batch):
            seen.append((name, batch))
            return batch * 10

        return PipelineStage(name, run)

    return [stage("first"), stage("second")]


def test_a_batch_passes_all_stages_while_newer_ones_follow():
    seen, ended = [], []
    made = stages(seen)
    made[1].data_exhausted_callback = lambda: ended.append(len(seen))
    train = StagedTrainPipeline(made)
    data = iter([1, 2, 3])
    assert train.progress(data) == 100
    assert seen == [("first", 1), ("second", 10), ("first", 2), ("second", 20), ("first", 3)]
    assert [train.progress(data) for _ in range(3)] == [200, 300, None]
    assert len(ended) == 1
    assert train.progress(iter([4])) == 400


def test_a_flush_takes_no_new_batch():
    flushed = []
    train = StagedTrainPipeline(stages([]), on_flush_end=lambda: flushed.append(True))
    data = iter(range(1, 9))
    assert train.progress(data) == 100
    train.set_flush(True)
    assert [train.progress(data) for _ in range(3)] == [200, 300, None]
    assert flushed == [True]
    assert train.progress(data) == 400


def test_no_stage():
    with pytest.raises(ValueError, match="pipeline_stages"):
        StagedTrainPipeline([])


def train_with_ids_ahead():
    batches = models.make_batches(10)
    model, optimizer = models.sharded(spec=SGD(lr=0.1))
    util = SparseDataDistUtil(model)
    pipeline = StagedTrainPipeline(
        [
            PipelineStage("copy", lambda batch: batch.to(torch.device("cpu"))),
            PipelineStage("ids", util.start_sparse_data_dist, fill_callback=util.wait_sparse_data_dist),
        ]
    )
    iterator, outputs = iter(batches), []
    while (batch := pipeline.progress(iterator)) is not None:
        optimizer.zero_grad()
        losses, output = model(batch)
        losses.backward()
        optimizer.step()
        outputs.append(output)
    assert util.detach() is util.detach() is model
    other, its_optimizer = models.sharded(spec=SGD(lr=0.1))
    assert torch.equal(torch.stack(outputs), torch.stack(models.plain_loop(other, its_optimizer, batches)))
    models.assert_same(models.state_of(model, optimizer), models.state_of(other, its_optimizer))


def test_ids_travel_ahead_and_the_numbers_stay(ranks):
    ranks(2).run(train_with_ids_ahead)
