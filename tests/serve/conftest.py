import atexit
import contextlib
import functools
import http.client
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

from meshrec.export.archive import import_readers
from meshrec.serve import Limits, ServerOptions
from meshrec.serve.child import Child
from meshrec.serve.options import listen
from meshrec.serve.requests import Request, Signature
from meshrec.serve.server import Server
from meshrec.serve.trial import PackageTrial, _try_packages
from tests.serve.toys import FEATURES, NUM_DENSE, NUM_ROWS, Toy, check_toy, make_toy, open_with

SIGNATURE = Signature(FEATURES, NUM_DENSE, dict.fromkeys(FEATURES, NUM_ROWS))


@pytest.fixture(scope="session", autouse=True)
def toys():
    """Servers of these tests open toys: to load an exported program takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        open_with(patch, Toy, check_toy)
        yield


@pytest.fixture(scope="session")
def packages(tmp_path_factory):
    """Two versions of a model."""
    return [make_toy(tmp_path_factory.mktemp("toys") / f"v{n}", n + 1) for n in (0, 1)]


@pytest.fixture(scope="session")
def predictors(packages):
    return [Toy(package) for package in packages]


def samples(num, seed=0):
    """As ``POST /predict`` takes them."""
    draw = np.random.default_rng(seed)
    return [
        {
            "dense": draw.standard_normal(NUM_DENSE).round(3).tolist(),
            **{f: draw.integers(0, NUM_ROWS, draw.integers(0, 4)).tolist() for f in FEATURES},
        }
        for _ in range(num)
    ]


def request_of(given):
    """The same as arrays."""
    return Request(
        np.array([each["dense"] for each in given], np.float32).reshape(-1, NUM_DENSE),
        [np.array([i for each in given for i in each[f]], np.int64) for f in FEATURES],
        [np.array([len(each[f]) for each in given], np.int64) for f in FEATURES],
    )


def scores_of(predictor, given):
    request = request_of(given)
    arrays = (torch.from_numpy(a) for a in (request.dense, *request.values, *request.lengths))
    dense, *jagged = arrays
    half = len(FEATURES)
    return predictor.run(dense, jagged[:half], jagged[half:]).numpy()


class Client:
    """One connection to a server."""

    def __init__(self, url, context=None):
        where = urlsplit(url)
        kind = http.client.HTTPConnection
        options = {}
        if where.scheme == "https":
            kind, options = http.client.HTTPSConnection, {"context": context}
        self.connection = kind(where.hostname, where.port, timeout=60, **options)

    def __call__(self, method, path, body=None, headers=None):
        """Status, headers, and what the JSON body says."""
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        self.connection.request(method, path, body, headers or {})
        response = self.connection.getresponse()
        data = response.read()
        if response.headers.get("content-type") == "application/json":
            data = json.loads(data)
        return response.status, response.headers, data

    def close(self):
        self.connection.close()


def try_packages(parent):
    """As the trial process of a server with workers: every package would import these for seconds."""
    import_readers()
    _try_packages(parent)


@functools.cache
def shared_process():
    child = Child(try_packages)
    atexit.register(child.stop)
    return ThreadPoolExecutor(1), child


class SharedTrial(PackageTrial):
    """All servers in this process try packages out in one other process: to start one takes seconds."""

    def __init__(self, open_package):
        self._open = open_package
        self._pool, self._child = shared_process()

    def close(self):
        """Other servers need it."""


@contextlib.contextmanager
def running(models, *, wait=True, **options):
    """A server in a thread, and where it is."""
    options = ServerOptions(port=0, linger=0.2, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshrec.serve.server.PackageTrial", SharedTrial)
        server = Server({name: Path(path) for name, path in models.items()}, options, listen(options))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while wait and not server.repository.is_ready:
            assert thread.is_alive()
            time.sleep(0.01)
        yield server
    finally:
        server.stop()
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def server(packages):
    """One for all tests that leave it as it was."""
    with running({"clicks": packages[0]}, max_body=1 << 20, limits=Limits(max_batch=64)) as server:
        yield server


@pytest.fixture
def client(server):
    client = Client(server.url)
    yield client
    client.close()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return bound.getsockname()[1]


def link(folder, place):
    """``place`` becomes a link to the folder, at once."""
    new = place.with_name(f".{place.name}-{os.getpid()}")
    new.symlink_to(folder)
    new.replace(place)
