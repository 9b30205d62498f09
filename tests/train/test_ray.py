"""What ranks do as workers of Ray, without a cluster. tests/hosts/test_ray.py trains on one."""

import sys
import types
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshrec.cli.on_ray import train_on_ray
from meshrec.data.features import Features, Hashed, Label
from meshrec.runs.job import Job
from meshrec.train import ray as on_ray
from meshrec.train.observers import Evaluated, Logged, Reported
from meshrec.train.run_folder import RunFolder


class Pointed:
    """A checkpoint of Ray: a folder."""

    def __init__(self, folder):
        self.path = folder
        self.content = {path.name: path.read_text() for path in Path(folder).iterdir()}

    from_directory = classmethod(lambda cls, folder: cls(folder))

    @contextmanager
    def as_directory(self):
        for name, text in self.content.items():
            Path(self.path).mkdir(exist_ok=True)
            (Path(self.path) / name).write_text(text)
        yield self.path


@pytest.fixture
def reports(monkeypatch):
    found = []
    fake = types.ModuleType("ray.train")
    fake.report = lambda metrics, checkpoint=None: found.append((metrics, checkpoint))
    fake.Checkpoint = Pointed
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.train", fake)
    return found


def line(step, **more):
    return {"step": step, "loss": 0.5, "nested": [1], **more}


def test_workers_report_at_the_same_steps(reports, tmp_path):
    for reporter in (on_ray._Reporter(10), on_ray._Reporter(10, RunFolder(tmp_path))):
        for event in (Logged(line(5)), Logged(line(10)), Reported("x"), Evaluated(line(12), True)):
            reporter(event)
    steps = [metrics["step"] for metrics, _ in reports]
    assert steps == [10, 12] * 2
    assert reports[0][0] == {"step": 10, "loss": 0.5}
    assert all(checkpoint is None for _, checkpoint in reports)


def test_the_first_worker_points_to_the_newest_checkpoint(reports, tmp_path, small):
    from meshrec.runs.worker import run_rank

    job = Job(recipe=small(checkpoint_every=5), name="mine", runs=tmp_path / "runs", device="cpu")
    reporter = on_ray._Reporter(5)

    def screen(folder):
        reporter.folder = folder
        return lambda event: None

    run_rank(Job(**{**vars(job), "on_event": reporter}), screen)
    reporter._report(line(10))  # the last one is finished now
    paths = [on_ray.checkpoint_path(checkpoint) for _, checkpoint in reports if checkpoint is not None]
    assert len(set(paths)) == len(paths) >= 1
    assert paths[-1].name == "step-0000000010"
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="MeshRec"):
        on_ray.checkpoint_path(Pointed(tmp_path / "other"))


class Rows:
    """A dataset of Ray Data that writes one file."""

    writes = 0

    def write_parquet(self, folder):
        Rows.writes += 1
        Path(folder).mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"y": [0, 1] * 20, "a": ["b", "c"] * 20}), f"{folder}/0.parquet")


def test_ray_data_is_written_once(tmp_path):
    features = Features(labels=(Label(column="y"),), features=(Hashed(name="a", num_embeddings=9),))
    for _ in range(2):
        source = on_ray.data_source(Rows(), test=Rows(), folder=tmp_path, features=features)
    assert Rows.writes == 2
    assert source.validation is None
    dataset = source.load()
    assert dataset.train.num_samples == dataset.test.num_samples == 40


def test_numbers_of_workers(small):
    for most, least in ((0, None), (2, 3), (2, 0)):
        with pytest.raises(ValueError, match="--num-workers"):
            train_on_ray(Job(recipe=small()), most, least, 0)
    with pytest.raises(ValueError, match="among 3"):
        train_on_ray(Job(recipe=small()), 3, 2, 0)
