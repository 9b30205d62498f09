import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshrec.checkpoint import CheckpointError, CheckpointManager
from meshrec.data import DataError, parquet
from meshrec.data.features import Features, Integer, Label
from meshrec.planner import load_plan
from meshrec.runs import worker
from meshrec.runs.host_folder import LAUNCH_VARIABLE
from meshrec.runs.job import Job
from meshrec.runs.worker import next_commands, run_rank
from meshrec.train import DataSource
from meshrec.train.observers import Logged
from meshrec.train.ranks import join
from meshrec.train.run_folder import CONFIG, SUMMARY, RunFolder


def test_a_run_leaves_its_folder(tmp_path, small):
    events = []
    summary = run_rank(
        Job(recipe=small(epochs=2), runs=tmp_path, device="cpu", baselines=True), lambda _: events.append
    )
    folder = RunFolder(tmp_path / "small-001")
    assert folder.read_json(SUMMARY) == summary
    assert summary["state"] == "finished"
    names = {"global mean", "item popularity", "logistic regression"}
    assert set(summary["baselines"]) - {"LightGBM"} == names
    assert " won: test AUC " in summary["winner"]
    told = [event.text for event in events if type(event).__name__ == "Reported"]
    for name in names:  # as each is done, for screens without a progress bar
        assert sum(text.startswith(f"baseline {name}: AUC ") for text in told) == 1
    assert folder.read_json(CONFIG)["recipe"]["training"]["epochs"] == 2
    assert load_plan(folder.plan).required_inputs().batch_size == 100
    assert folder.report.read_text().startswith("<!doctype html>")
    assert folder.plan_page.read_text().startswith("<!doctype html>")
    assert list(tmp_path.glob("small-001/events.out.tfevents*"))
    assert [type(event).__name__ for event in events][-1] == "Finished"


@dataclass(frozen=True, kw_only=True)
class Damaged(DataSource):
    """Rows of which some have no item."""

    path: Path

    def load(self):
        schema = Features(labels=(Label(column="y"),), features=(Integer(name="item", num_embeddings=50),))
        return parquet(train=self.path, schema=schema, on_error="skip")


def test_skipped_rows_are_counted_once_and_samples_are_those_that_were_trained(tmp_path, small):
    items = [None if n in (7, 30) else n % 50 for n in range(400)]
    path = tmp_path / "some.parquet"
    pq.write_table(pa.table({"y": [n % 2 for n in range(400)], "item": items}), path)
    recipe = replace(small(epochs=2), data=Damaged(path=path))
    summary = run_rank(Job(recipe=recipe, runs=tmp_path, device="cpu"), lambda _: lambda _: None)
    ((file, reasons),) = summary["skipped"].items()
    assert file.endswith("some.parquet")
    assert sum(reasons.values()) == 2  # once, though there were two epochs
    assert summary["samples"] == 2 * 398


def test_a_run_whose_end_is_not_on_the_disk_is_not_finished(tmp_path, small, monkeypatch):
    def full(*_):
        raise CheckpointError("saving failed: OSError: No space left on device")

    monkeypatch.setattr(CheckpointManager, "async_save", full)
    monkeypatch.setattr(CheckpointManager, "save", full)
    summary = run_rank(Job(recipe=small(epochs=1), runs=tmp_path, device="cpu"), lambda _: lambda _: None)
    assert summary["state"] == "failed"
    assert "the last checkpoint could not be saved: " in summary["error"]
    assert summary["failed_saves"]
    assert RunFolder(tmp_path / "small-001").state().name == "failed"


def test_a_start_that_ended_before_its_first_checkpoint_leaves_no_metrics(tmp_path, small, monkeypatch):
    def dies(event):
        if isinstance(event, Logged) and event.line["step"] == 10:
            raise OSError("the host is gone")

    def job(**options):
        return Job(recipe=small(epochs=2), runs=tmp_path, device="cpu", **options)

    monkeypatch.setenv(LAUNCH_VARIABLE, "job-7")  # a launch that starts again under its ID
    with pytest.raises(OSError, match="host"):
        run_rank(job(name="x", on_event=dies), lambda _: lambda _: None)
    folder = RunFolder(tmp_path / "x")
    assert folder.metrics()
    run_rank(job(name="x"), lambda _: lambda _: None)
    monkeypatch.delenv(LAUNCH_VARIABLE)
    run_rank(job(name="alone"), lambda _: lambda _: None)
    steps = [
        [(line["kind"], line["step"], line["loss"]) for line in each.metrics()]
        for each in (folder, RunFolder(tmp_path / "alone"))
    ]
    assert steps[0] == steps[1]


def test_errors_are_kept(tmp_path, small):
    from meshrec.train import Placement

    job = Job(recipe=small(placement=Placement(memory_gib=1e-6)), name="x", runs=tmp_path, device="cpu")
    with pytest.raises(ValueError, match=r"memory"):
        run_rank(job, lambda _: lambda _: None)
    assert not (tmp_path / "x").exists()  # nothing in it would be worth a look


def load_with_one_failing_rank(error):
    ranks = join("cpu")

    def load_data(*_):
        if ranks.rank == 1:
            raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "load_data", load_data)
        run = worker.RankRun.__new__(worker.RankRun)
        run._ranks, run._folder = ranks, None
        run._job = SimpleNamespace(recipe=SimpleNamespace(data=None), warm_start=None)
        try:
            run._load()
        except Exception as caught:
            return type(caught), str(caught)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (DataError("a.csv has no column 'user'"), ValueError, "rank 1: a.csv has no column 'user'"),
        (RuntimeError("no"), RuntimeError, "rank 1: RuntimeError: no"),
    ],
)
def test_an_error_of_one_ranks_data_is_the_same_on_all(ranks, error, kind, text):
    assert ranks(2).run(load_with_one_failing_rank, error) == [(kind, text)] * 2


def test_printed_commands_quote_names_with_blanks(tmp_path):
    printed = next_commands(RunFolder(tmp_path / "my runs" / "a b"))
    for name in ("resume", "evaluate", "predict", "package", "serve", "export", "recommend"):
        words = shlex.split(printed[name])
        assert any("a b" in word for word in words), printed[name]
        assert not {"a", "b", "runs/a"} & set(words)
