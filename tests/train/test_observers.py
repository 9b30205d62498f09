import builtins
import logging
import time

from meshrec.train import RunFolder
from meshrec.train.observers import Evaluated, Finished, FolderObserver, Logged, Started, TensorBoardObserver

LINE = {"kind": "train", "step": 3, "loss": 0.5}


def test_metrics_reach_the_folder(tmp_path):
    folder = RunFolder(tmp_path)
    observer = FolderObserver(folder)
    for event in (Logged(LINE), Evaluated({"kind": "validation", "step": 3}, True), Finished({})):
        observer(event)
    assert folder.metrics() == [LINE, {"kind": "validation", "step": 3}]


def test_metrics_reach_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first_step, steps in ((0, (3, 6, 9)), (5, (6,))):  # the second goes on from step 5
        time.sleep(1.1 * (first_step > 0))  # files of one second are read in the order of their names
        observer = TensorBoardObserver(tmp_path)
        observer(started(first_step))
        for step in steps:
            observer(Logged({**LINE, "step": step, "loss": step + first_step / 10}))
        observer(Finished({}))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("train/loss")] == [(3, 3.0), (6, 6.5)]


def started(first_step):
    return Started(**{**dict.fromkeys(Started._fields), "first_step": first_step})


def test_without_tensorboard_one_line_says_so(tmp_path, monkeypatch, caplog):
    real = builtins.__import__

    def refuse(name, *rest, **options):
        if name == "torch.utils.tensorboard":
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with caplog.at_level(logging.WARNING, "meshrec"):
        TensorBoardObserver(tmp_path)(Logged(LINE))
    assert [record.message for record in caplog.records] == [
        "no TensorBoard events are written: install meshrec[train] for them."
    ]
