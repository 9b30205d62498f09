"""The pipeline's numbers are the plain loop's also for random models under random plans.

``MESHREC_DRAWS=500 MESHREC_SEED=7 pytest tests/pipeline/test_random_plans.py`` draws more of them, and
others.
"""

import importlib.util
import os
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from meshrec.pipeline import TrainPipeline

_path = Path(__file__).parents[1] / "checkpoint" / "random_plans.py"
_spec = importlib.util.spec_from_file_location("random_plans", _path)
plans = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(plans)

SEED = os.environ.get("MESHREC_SEED")
DRAWS = settings(
    max_examples=int(os.environ.get("MESHREC_DRAWS", "5")),
    derandomize=SEED is None,
    suppress_health_check=list(HealthCheck),
    database=None,
)
STEPS = 7


def of_rank(case, env, step):
    mine = plans.of_rank(case, env, step)
    bags, _ = plans.reference.inputs(case, step)
    return tuple(plans.features(case, bags, collection, mine) for collection in ("ebc", "ec"))


def loss_by(case, model):
    """A forward as a pipeline takes it; each table has a weight of its own in the loss."""

    def forward(batch):
        outputs = plans.by_use(case, model(*batch)).values()
        loss = sum((number * output).sin().sum() for number, output in enumerate(outputs, start=1))
        return loss, loss.detach()

    return forward


def both_ways(case, accumulate):
    """Losses and values of the plain loop, and of the pipeline."""
    model, env = plans.make(case, 0)
    forward, losses = loss_by(case, model), []
    for step in range(STEPS):
        if step % accumulate == 0:
            model.fused_optimizer.zero_grad()
        loss, output = forward(of_rank(case, env, step))
        loss.backward()
        losses.append(output)
        if step % accumulate == accumulate - 1 or step == STEPS - 1:
            model.fused_optimizer.step()
    other, env = plans.make(case, 0)
    pipeline = TrainPipeline(
        other, other.fused_optimizer, forward=loss_by(case, other), accumulate=accumulate, strict=True
    )
    outputs = list(pipeline(of_rank(case, env, step) for step in range(STEPS)))
    return (losses, plans.whole(case, model)), (outputs, plans.whole(case, other))


@DRAWS
@seed(int(SEED or 0))
@given(rng=st.randoms(use_true_random=False))
def test_the_pipeline_trains_as_the_plain_loop(ranks, rng):
    case, accumulate = plans.draw_case(rng), rng.choice([1, 1, 3])
    world = plans.MESHES[case["meshes"][0]][0]
    for rank, (plain, piped) in enumerate(ranks(world).run(both_ways, case, accumulate)):
        assert torch.equal(torch.stack(piped[0]), torch.stack(plain[0])), rank
        for name, values in plain[1].items():
            for slot, value in values.items():
                found = torch.as_tensor(piped[1][name][slot])
                assert torch.equal(found, torch.as_tensor(value)), (rank, name, slot)
