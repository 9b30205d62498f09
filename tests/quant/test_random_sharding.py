"""Random quantised models under random rectangles are what one process has, also moved and loaded.

``MESHREC_DRAWS=500 MESHREC_SEED=7 pytest tests/quant/test_random_sharding.py`` draws more of them, and
others.
"""

import importlib.util
import os
import tempfile
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

_path = Path(__file__).parent / "random_sharding.py"
_spec = importlib.util.spec_from_file_location("random_sharding", _path)
random_sharding = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(random_sharding)

SEED = os.environ.get("MESHREC_SEED")
DRAWS = settings(
    max_examples=int(os.environ.get("MESHREC_DRAWS", "10")),
    derandomize=SEED is None,
    suppress_health_check=list(HealthCheck),
    database=None,
)
TOLERANCE = {None: 1e-6, "FP16": 1e-3, "BF16": 8e-3}


def check(case, found, model, when):
    outputs, values = found
    tolerance = TOLERANCE[case["output"]]
    for use, truth in random_sharding.looked_up(case, model).items():
        assert outputs[use].dtype == truth.dtype, (when, use)
        torch.testing.assert_close(
            outputs[use],
            truth,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda message, use=use: f"{when}: {use}\n{message}",
        )
    expected = model.state_dict()
    assert values.keys() == expected.keys(), when
    for name, truth in expected.items():
        assert torch.equal(values[name], torch.as_tensor(truth)), (when, name)


@DRAWS
@seed(int(SEED or 0))
@given(rng=st.randoms(use_true_random=False))
def test_what_is_quantised_moved_and_loaded_is_what_one_process_has(ranks, rng):
    case = random_sharding.draw_case(rng)
    worlds = [random_sharding.plans.MESHES[mesh][0] for mesh in case["meshes"]]
    model = random_sharding.quantised(case, random_sharding.floats(case))
    with tempfile.TemporaryDirectory() as folder:
        moved = ranks(worlds[0]).run(random_sharding.move, case, f"{folder}/saved")
        loaded = ranks(worlds[1]).run(random_sharding.load, case, f"{folder}/saved")
    for rank, stages in enumerate(moved):
        for stage, found in zip(("sharded first", "quantised first", "moved"), stages, strict=True):
            check(case, found, model, f"{stage}, rank {rank}")
    for rank, found in enumerate(loaded):
        check(case, found, model, f"loaded, rank {rank}")
