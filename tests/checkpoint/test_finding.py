import pytest
import torch

from meshrec.checkpoint import CheckpointManager, find_checkpoint, load, save
from meshrec.checkpoint.finding import all_checkpoints


def model(value):
    made = torch.nn.Linear(1, 1)
    made.weight.data.fill_(value)
    return made


@pytest.fixture
def run(tmp_path):
    """Checkpoints of steps 10 and 20, and the best of step 15."""
    for step in (10, 20):
        CheckpointManager(tmp_path / "checkpoints").save(step, {"model": model(float(step))})
    CheckpointManager(tmp_path / "best", keep_last=1).save(15, {"model": model(15.0)})
    (tmp_path / "checkpoints" / "step-0000000030").mkdir()  # never finished
    return tmp_path


@pytest.mark.parametrize(
    ("options", "step"), [({}, 15), ({"last": True}, 20), ({"step": 10}, 10), ({"step": 15}, 15)]
)
def test_a_run_stands_for_the_weights_that_it_reports(run, options, step):
    assert find_checkpoint(run, **options).name == f"step-{step:010d}"


def test_load_takes_the_same(run):
    loaded = model(0.0)
    load(run, {"model": loaded})
    assert loaded.weight.item() == 15


def test_without_a_best_it_is_the_last(run):
    assert find_checkpoint(run / "checkpoints").name.endswith("20")
    save(run / "alone", {"model": model(1.0)})
    assert find_checkpoint(run / "alone") == run / "alone"
    assert len(all_checkpoints(run)) == 4


def test_what_is_not_there_is_named(run, tmp_path):
    with pytest.raises(ValueError, match=r"step 11.*\[10, 15, 20\]"):
        find_checkpoint(run, step=11)
    with pytest.raises(ValueError, match="checkpoint"):
        find_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="checkpoint"):
        all_checkpoints(tmp_path / "nowhere")


def test_checkpoints_whose_names_have_no_step_are_passed_over_with_a_line(run, caplog):
    for name in ("step-x", "step-", "step-20"):
        save(run / "checkpoints" / name, {"model": model(1.0)})
    assert find_checkpoint(run, last=True).name == "step-0000000020"
    lines = [record.getMessage() for record in caplog.records]
    assert [name for name in ("step-x", "step-20") if any(f"{name} " in line for line in lines)] == [
        "step-x",
        "step-20",
    ]
    assert find_checkpoint(run / "checkpoints" / "step-x").name == "step-x"  # it can still be named
