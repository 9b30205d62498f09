"""Random models under random plans: trained, moved, saved, loaded under another and trained on, they are what
plain torch learns.

``MESHREC_DRAWS=500 MESHREC_SEED=7 pytest tests/checkpoint/test_random_plans.py`` draws more of them, and
others.
"""

import importlib.util
import os
import tempfile
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from meshrec.checkpoint import verify_deltas
from meshrec.checkpoint.delta_files import read_delta

_spec = importlib.util.spec_from_file_location("random_plans", Path(__file__).parent / "random_plans.py")
random_plans = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(random_plans)
Reference = random_plans.reference.Reference

SEED = os.environ.get("MESHREC_SEED")
DRAWS = settings(
    max_examples=int(os.environ.get("MESHREC_DRAWS", "6")),
    derandomize=SEED is None,
    suppress_health_check=list(HealthCheck),
    database=None,
)


def check_values(case, ranks_values, expected, when):
    for rank, values in enumerate(ranks_values):
        for table in case["tables"]:
            name = table["name"]
            own = dict(values[name])
            assert own.pop("step") == expected.step, (when, rank, name)
            truth = {"weight": expected.weights[name], **expected.state[name]}
            assert own.keys() == truth.keys(), (when, rank, name)
            for slot, value in own.items():
                check(value, truth[slot], f"{when}, rank {rank}: {slot} of {name}", case, table)


def check_outputs(case, ranks_outputs, expected, when):
    tables = {table["name"]: table for table in case["tables"]}
    coarsest = min(case["tables"], key=lambda table: list(COARSE).index(table["dtype"]))
    for use, truth in expected.items():
        table = tables[use[0]] if isinstance(use, tuple) else coarsest
        found = torch.cat([outputs[use] for outputs in ranks_outputs])
        check(found, truth, f"{when}: output of, or gradient of weights of {use}", case, table)


COARSE = {"bfloat16": 2**-4, "float16": 2**-7, "float32": 2e-4}
"""How far numbers may be from the truth, relative: stochastic roundings of the table's type, one a step."""


def check(value, truth, what, case, table):
    rtol = COARSE[table["dtype"]]
    atol = 1e-5 if rtol < 1e-3 else rtol
    if case["clip"] is not None and any(each["dtype"] != "float32" for each in case["tables"]):
        rtol, atol = max(rtol, 2e-3), max(atol, 2e-4)  # rounded gradients have part in the norm
    torch.testing.assert_close(
        value.double(), truth, rtol=rtol, atol=atol, msg=lambda message: f"{what}\n{message}"
    )


def check_steps(case, reference, ranks_outputs, steps, world_size, when):
    for number, step in enumerate(steps):
        expected = reference.train(step, world_size)
        check_outputs(case, [outputs[number] for outputs in ranks_outputs], expected, f"{when}, step {step}")


@DRAWS
@seed(int(SEED or 0))
@given(rng=st.randoms(use_true_random=False))
def test_what_is_learned_moved_and_loaded_is_what_plain_torch_learns(ranks, rng):
    case = random_plans.draw_case(rng)
    worlds = [random_plans.MESHES[mesh][0] for mesh in case["meshes"]]
    before, after = case["steps"]
    first, rest = range(before), range(before, before + after)
    with tempfile.TemporaryDirectory() as folder:
        begun = ranks(worlds[0]).run(random_plans.begin, case, folder)
        gone_on = ranks(worlds[1]).run(random_plans.go_on, case, folder)
    truth = Reference(case)
    outputs = [each[2] for each in begun]
    check_steps(case, truth, outputs, first, worlds[0], "at first")
    check_values(case, [each[0] for each in begun], truth, "when saved")
    check_values(case, [each[1] for each in begun], truth, "moved")
    check_values(case, [each[0] for each in gone_on], truth, "loaded")
    moved, loaded = truth.copy(), truth
    check_steps(case, moved, [each[before:] for each in outputs], rest, worlds[0], "after moving")
    check_values(case, [each[3] for each in begun], moved, "in the end, moved")
    check_steps(case, loaded, [each[1] for each in gone_on], rest, worlds[1], "after loading")
    check_values(case, [each[2] for each in gone_on], loaded, "in the end, loaded")


@DRAWS
@seed(int(SEED or 0))
@given(rng=st.randoms(use_true_random=False))
def test_deltas_bring_the_weights_of_before_up_to_date(ranks, rng):
    case = random_plans.draw_case(rng)
    with tempfile.TemporaryDirectory() as folder:
        copy, after = ranks(random_plans.MESHES[case["meshes"][0]][0]).run(
            random_plans.publish, case, folder
        )[0]
        for record in verify_deltas(folder):
            delta = read_delta(folder, record)
            for table in case["tables"]:
                name, weight = random_plans.weight_name(table), copy[table["name"]]["weight"]
                if name in delta.whole:
                    weight.copy_(delta.whole[name])
                if name in delta.rows:
                    ids, rows = delta.rows[name]
                    weight[ids] = rows
    for table in case["tables"]:
        name = table["name"]
        assert torch.equal(copy[name]["weight"], after[name]["weight"]), name
