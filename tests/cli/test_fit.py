"""Features fitted once, by ranks or on the workers of an engine, for any number of runs."""

import shutil
import sys
import types
from dataclasses import replace

import pytest

from meshrec.cli.fit import main as fit
from meshrec.cli.train import main as train
from meshrec.data import DataError
from meshrec.data.engines import dask_engine, ray_engine
from meshrec.data.features import Features, Vocabulary, fitting
from meshrec.data.features.fit_folder import read_fit
from meshrec.runs.fitting import features_of
from meshrec.train import RunFolder
from tests.train.shop import FEATURES, source, write_shop

RECIPE = "tests/train/shop.py:recipe"


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shop")
    write_shop(folder)
    assert fit([RECIPE, "--data.train", str(folder), "--out", str(folder / "fitted")]) == 0
    return folder


def content(folder):
    return Features.load(folder / "features.json").to_json()


def test_a_run_takes_the_features_that_it_would_have_fitted(shop, tmp_path, monkeypatch, capsys):
    words = [RECIPE, "--data.train", str(shop), "--runs", str(tmp_path), "--quiet"]
    assert train([*words, "--name", "fits"]) == 0
    monkeypatch.setattr(fitting, "fit_features", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(fitting, "fit_on_ranks", lambda *_, **__: 1 / 0)
    assert train([*words, "--name", "takes", "--data.fitted", str(shop / "fitted")]) == 0
    fits, takes = (RunFolder(tmp_path / name) for name in ("fits", "takes"))
    assert features_of(takes).to_json() == features_of(fits).to_json() == content(shop / "fitted")
    assert takes.read_json("summary.json")["test"] == fits.read_json("summary.json")["test"]


def test_a_refit_on_all_rows_fits_features_again(shop, tmp_path):
    words = [RECIPE, "--data.train", str(shop), "--runs", str(tmp_path), "--name", "r", "--quiet"]
    assert train([*words, "--data.fitted", str(shop / "fitted"), "--final", "all"]) == 0
    final = features_of(RunFolder(tmp_path / "r" / "final"))
    assert len(final["tags"].vocabulary) == len(features_of(RunFolder(tmp_path / "r"))["tags"].vocabulary)
    assert final.to_json() != content(shop / "fitted")


def test_ranks_fit_what_one_rank_fits(shop):
    assert fit([RECIPE, "--data.train", str(shop), "--out", str(shop / "by ranks"), "--nproc", "2"]) == 0
    assert content(shop / "by ranks") == content(shop / "fitted")


def test_workers_of_dask_fit_what_one_rank_fits(shop, monkeypatch):
    distributed = pytest.importorskip("distributed", reason="Dask is not installed")
    words = [RECIPE, "--data.train", str(shop), "--out", str(shop / "by dask"), "--on", "dask"]
    monkeypatch.delenv("DASK_SCHEDULER_ADDRESS", raising=False)
    with pytest.raises(ValueError, match="DASK_SCHEDULER_ADDRESS is not set"):
        fit(words)
    cluster = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
    )
    with cluster:
        monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", cluster.scheduler_address)
        assert fit(words) == 0
        with pytest.raises(DataError, match="no 3"):
            list(dask_engine(2)(fails_at_3, range(5)))
        assert sorted(dask_engine(2)(abs, range(-5, 0))) == [1, 2, 3, 4, 5]
        assert list(dask_engine(2)(abs, [])) == []
    assert content(shop / "by dask") == content(shop / "fitted")


def fails_at_3(number):
    if number == 3:
        raise DataError("no 3")
    return number


class TaskError(Exception):
    def __init__(self, cause):
        super().__init__("a long traceback")
        self.cause = cause


@pytest.fixture
def fake_ray(monkeypatch):
    """Ray as far as the engine needs it. tests/hosts/test_ray.py has a cluster."""
    fake = types.ModuleType("ray")
    fake.running, fake.largest = 0, 0

    def remote(**options):
        assert options == {"max_retries": 3}

        def start(function, *arguments):
            fake.running += 1
            fake.largest = max(fake.largest, fake.running)
            return function, arguments

        return lambda function: types.SimpleNamespace(remote=lambda *words: start(function, *words))

    def get(result):
        fake.running -= 1
        function, arguments = result
        try:
            return function(*arguments)
        except DataError as error:
            raise TaskError(error) from error

    fake.put, fake.remote, fake.get = (lambda value: value), remote, get
    # The newest first: results may come in any order.
    fake.wait = lambda running, num_returns: (running[-num_returns:], running[:-num_returns])
    fake.exceptions = types.SimpleNamespace(RayTaskError=TaskError)
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


def test_tasks_of_ray_are_bounded_and_raise_their_own_errors(fake_ray):
    assert sorted(ray_engine(3)(abs, range(-7, 0))) == [1, 2, 3, 4, 5, 6, 7]
    assert fake_ray.largest == 3
    with pytest.raises(DataError, match="no 3"):
        list(ray_engine(2)(fails_at_3, range(5)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data.seed", "1"], r"fit\.split\.seed 0.*has 1"),
        (["--data.split-test", "0.2"], r"fit\.split\.test 0\.1.*has 0\.2"),
        (["--data.on-error", "skip"], r"fit\.on_error 'raise'.*has 'skip'"),
    ],
)
def test_features_of_another_fit_are_refused(shop, tmp_path, words, message):
    line = [RECIPE, "--data.train", str(shop), "--runs", str(tmp_path), "--data.fitted", str(shop / "fitted")]
    with pytest.raises(DataError, match=message):
        train([*line, *words, "--quiet"])


def test_other_features_are_refused(shop):
    changed = replace(FEATURES, features=(*FEATURES.features[:1], Vocabulary(name="user", min_count=3)))
    with pytest.raises(DataError, match=r"fit\.features\.features"):
        source(features=changed, fitted=shop / "fitted").fit()
    user = replace(FEATURES.features[1], min_count=3)
    changed = replace(FEATURES, features=(FEATURES.features[0], user, *FEATURES.features[2:]))
    with pytest.raises(DataError, match=r"fit\.features\.features\.1\.min_count 2.*has 3"):
        source(features=changed, fitted=shop / "fitted").fit()


def test_damaged_and_missing_features_are_refused(shop, tmp_path):
    with pytest.raises(DataError, match=r"meshrec fit RECIPE --out"):
        read_fit(tmp_path, {})
    shutil.copytree(shop / "fitted", tmp_path / "fitted")
    path = tmp_path / "fitted" / "features.json"
    path.write_text(path.read_text().replace('"user"', '"item"', 1))
    with pytest.raises(DataError, match=r"features\.json.*checksum"):
        read_fit(tmp_path / "fitted", {})


def test_what_cannot_be_fitted_is_told_before_work_starts(shop, tmp_path):
    words = ["--data.train", str(shop), "--out", str(shop / "fitted")]
    with pytest.raises(ValueError, match="--force"):
        fit([RECIPE, *words])
    with pytest.raises(ValueError, match="--nproc 2"):
        fit([RECIPE, *words, "--force", "--on", "ray", "--nproc", "2"])
    with pytest.raises(ValueError, match="--num-workers 0"):
        fit([RECIPE, *words, "--force", "--on", "dask", "--num-workers", "0"])
    with pytest.raises(ValueError, match="--num-workers 4"):
        fit([RECIPE, *words, "--force", "--num-workers", "4"])
    with pytest.raises(ValueError, match="fitted already"):
        fit([RECIPE, *words, "--force", "--data.fitted", str(shop / "fitted")])
    with pytest.raises(ValueError, match="MovieLens"):
        fit(["movielens_dlrm", "--out", str(tmp_path / "x")])
