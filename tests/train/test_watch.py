from dataclasses import replace
from unittest import mock

import pytest
import torch

from meshrec.checkpoint import CheckpointManager
from meshrec.train import LossError, RunFolder, Trainer, join
from meshrec.train.observers import Stepped
from meshrec.train.watch import FiniteFlag, OutputWatch


def test_the_first_module_in_the_order_of_ending():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
    watch = OutputWatch(model)
    model(torch.ones(3, 2))
    assert watch.first_nonfinite() is None
    model[2].weight.data.fill_(float("inf"))
    model(torch.ones(3, 2))
    assert watch.first_nonfinite() == "2"
    watch.forget()
    assert watch.first_nonfinite() is None


def poisoned(recipe, folder, rank=0):
    """A trainer whose dense part turns NaN on one rank, in the seventh step."""
    ranks = join("cpu")
    trainer = Trainer(recipe, recipe.data.load(), ranks, folder=folder)
    count = iter(range(100))

    def poison(module, inputs):
        if next(count) == 6 and ranks.rank == rank:
            return (inputs[0] * float("nan"),)
        return None

    (layer, *_) = (each for each in trainer.built.model.modules() if isinstance(each, torch.nn.Linear))
    layer.register_forward_pre_hook(poison)
    return trainer


def run_poisoned(recipe, folder) -> str:
    with pytest.raises(LossError) as error:
        poisoned(recipe, folder, rank=1).run()
    return str(error.value)


def test_training_stops_at_the_first_loss_that_is_no_number(ranks, tmp_path, small):
    texts = ranks(2).run(run_poisoned, small(epochs=3, checkpoint_every=3), RunFolder(tmp_path))
    assert texts[0] == texts[1]
    assert (
        "step 7: rank 1: the loss is nan; the first module with NaN or infinity in its output is dense_arch"
        in texts[0]
    )
    assert "The last good checkpoint is" in texts[0]
    assert "--training.clip-norm" in texts[0]
    checkpoints = CheckpointManager(tmp_path / "checkpoints")
    assert checkpoints.steps() == [3, 6]
    recipe = small(epochs=3)
    again = Trainer(recipe, recipe.data.load(), join("cpu"), folder=RunFolder(tmp_path))
    assert again.resume()
    assert all(bool(value.isfinite().all()) for value in again.built.model.state_dict().values())


def test_the_first_of_several_batches_of_a_step_explains_its_failure(small):
    """The seventh batch is the first of two in step 4, and its loss is read after the step."""
    with pytest.raises(LossError, match=r"step 4: rank 0: the loss is nan; .* is dense_arch"):
        poisoned(small(epochs=1, batch_size=50, accumulate=2), None).run()


def test_a_loss_is_read_after_its_backward_pass(small):
    trainer, order = poisoned(small(epochs=1), None), []
    with mock.patch.object(FiniteFlag, "read", lambda flag: order.append("read") or bool(flag._flag)):
        parameter = next(iter(trainer.built.dense.params.values()))
        parameter.register_post_accumulate_grad_hook(lambda _: order.append("gradient"))
        with pytest.raises(LossError, match="step 7"):
            trainer.run()
    assert order == ["gradient", "read"] * 7


def test_an_evaluation_that_is_no_number_ends_the_run(small):
    recipe = replace(small(epochs=1))
    trainer = Trainer(recipe, recipe.data.load(), join("cpu"))

    def spoil(event):
        if isinstance(event, Stepped) and event.step == 10:
            next(iter(trainer.built.dense.params.values())).data.fill_(float("nan"))

    trainer._observer = spoil
    with pytest.raises(LossError, match="step 10"):
        trainer.run()
