"""The files in which workers share their metrics."""

import os
import resource
import tempfile

import pytest
from prometheus_client.mmap_dict import MmapedDict

from meshrec.serve.metrics import SHARED, Metrics

USE_ALL = (
    "m = Metrics(); m.record_cache('a', type('K', (), {'hits': 1, 'misses': 0, 'num_bytes': 1})); "
    "m.record_freshness('a', 1.0);"
)


@pytest.fixture
def shared(tmp_path, monkeypatch):
    monkeypatch.setenv(SHARED, str(tmp_path))
    return tmp_path


def test_room_is_reserved_before_files_are_mapped(shared):
    """A worker that wrote to a hole on a full disk was ended by SIGBUS."""
    Metrics(num_models=3)
    files = sorted(shared.iterdir())
    assert [path.name for path in files] == [
        f"{kind}_{os.getpid()}.db" for kind in ("counter", "gauge_livemin", "gauge_livesum", "histogram")
    ]
    for path in files:
        size = path.stat().st_size
        assert path.stat().st_blocks * 512 >= size >= 4 << 16
        values = MmapedDict(str(path))
        for model in range(3):
            for number in range(60):  # as many as a model has, with the longest name that a folder can have
                values.write_value(f"{model}{'m' * 255}{'h' * 250}{number}", 1.0, 0.0)
        values.close()
        assert path.stat().st_size == size


def test_every_kind_of_metric_has_its_reserved_file(run_code):
    """In a process of its own: prometheus_client settles at its import how values are kept."""
    code = (
        "import os; from meshrec.serve.metrics import Metrics; Metrics(); print(*os.listdir(os.environ['D']))"
    )
    with tempfile.TemporaryDirectory() as folder:
        done = run_code(code.replace("Metrics();", USE_ALL), **{SHARED: folder, "D": folder})
    assert sorted(name.rpartition("_")[0] for name in done.stdout.split()) == [
        "counter",
        "gauge_livemin",
        "gauge_livesum",
        "histogram",
    ]


def test_a_disk_without_room_is_named(shared):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(OSError, match=f"131072 bytes.*{shared}"):
            Metrics()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(shared.iterdir()) == []
