"""Runs on a cluster of Ray whose two nodes are hosts of their own: killed workers and nodes, and more
workers.
"""

import json
import os
import secrets
import subprocess
import sys
import time
from tempfile import TemporaryDirectory

import pytest

from tests.hosts.namespaces import STEPS_A_LIFE, hosts, kills, makes_hosts, needs_hosts, num_kills, until
from tests.hosts.runs import ENVIRONMENT, RECIPE, alone, bits, metrics
from tests.hosts.test_elastic import starts, step_of
from tests.train.shop import write_shop

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = [needs_hosts, makes_hosts]
NUM_KILLS = num_kills(6)
OPTIONS = ["--training.checkpoint-every", "10", "--training.phases-every", "0"]
SHOP = "tests/train/shop.py:recipe"
RAY = f"{os.path.dirname(sys.executable)}/ray"
ON_RAY_DATA = """
import sys

import ray
from ray.train import ScalingConfig

from meshrec.data.features import Features, Hashed, Label
from meshrec.train import DLRMConfig, DenseOptimizer, Recipe, Training
from meshrec.train.ray import data_source, trainer

ray.init()
rows = ray.data.from_items([{"y": n % 2, "a": f"v{n % 5}"} for n in range(400)], override_num_blocks=4)
features = Features(labels=(Label(column="y"),), features=(Hashed(name="a", num_embeddings=9),))
recipe = Recipe(
    name="rows",
    data=data_source(rows, rows.limit(100), folder=f"{sys.argv[1]}/rows", features=features),
    model=DLRMConfig(embedding_dim=8, bottom=(8,), top=(8,)),
    dense=DenseOptimizer(lr=0.01),
    training=Training(batch_size=40, epochs=2),
)
result = trainer(recipe, ScalingConfig(num_workers=2), out=f"{sys.argv[1]}/runs", name="rows").fit()
print("reported", result.metrics["step"])
"""


class RayCluster:
    """A head on the switch, without workers, and a node on every host. ``short``: a folder for sockets, whose
    paths must be short.
    """

    def __init__(self, nodes, switch, folder, short):
        self.nodes, self.switch, self.folder, self.short = nodes, switch, folder, short
        self.environment = {**ENVIRONMENT, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
        self.environment["RAY_ADDRESS"] = f"{switch.address}:6379"
        self.environment["RAY_health_check_period_ms"] = "1000"
        self.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        head = ["--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false"]
        self._start(switch, *head)
        for node in nodes:
            self.start_node(node)

    def _start(self, host, *words):
        environment = {name: value for name, value in self.environment.items() if name != "RAY_ADDRESS"}
        common = [
            f"--node-ip-address={host.address}",
            "--object-store-memory=100000000",
            "--disable-usage-stats",
        ]
        command = [RAY, "start", *words, *common, f"--temp-dir={self.short}/{host.name}"]
        assert self.popen(host, command, environment).wait(timeout=240) == 0, self.printed()

    def popen(self, host, words, environment=None):
        with (self.folder / "ray.txt").open("a") as log:
            return host.popen(words, env=environment or self.environment, stdout=log)

    def printed(self):
        """The end of what Ray has printed so far."""
        return (self.folder / "ray.txt").read_text()[-4000:]

    def start_node(self, node):
        """Start a node with room for one worker, so that every worker has a host of its own."""
        self._start(node, f"--address={self.switch.address}:6379", "--num-cpus=1")

    def train(self, *options):
        words = [
            sys.executable,
            "-m",
            "meshrec",
            "train",
            RECIPE,
            "--on",
            "ray",
            "--out",
            self.folder / "shared",
        ]
        return self.popen(self.switch, [*words, *OPTIONS, *options])


def test_killed_nodes_and_a_third_worker(tmp_path):
    run, seconds = tmp_path / "shared" / "mine", []
    epochs = (NUM_KILLS + 1) * STEPS_A_LIFE // 10
    with TemporaryDirectory() as short, hosts(3, tmp_path) as (*nodes, third, switch):
        cluster = RayCluster(nodes, switch, tmp_path, short)
        known = ["--training.epochs", epochs, "--training.batch-size", 96]
        options = ["--name", "mine", "--num-workers", 2, "--max-restarts", 100, *known]
        training = cluster.train(*options)
        for wanted, number in kills(NUM_KILLS):
            until(lambda wanted=wanted: step_of(run) >= wanted, 400, cluster.printed)
            before = len(starts(run))
            nodes[number].kill()
            killed = time.monotonic()
            nodes[number].boot()
            cluster.start_node(nodes[number])
            until(lambda before=before: len(starts(run)) > before, 400, cluster.printed)
            seconds.append(time.monotonic() - killed)
            print(f"node {number} killed, back after {seconds[-1]:.1f} s", flush=True)
        assert training.wait(timeout=500) == 0, cluster.printed()
        undisturbed = alone(tmp_path, 2, *OPTIONS, *known)
        assert bits(run) == bits(undisturbed)
        assert metrics(run) == metrics(undisturbed)
        cluster.start_node(third)
        more = ["--name", "mine", "--resume", "--num-workers", 3, "--training.epochs", epochs + 4]
        assert cluster.train(*more).wait(timeout=500) == 0, cluster.printed()
    found = starts(run)
    assert [each["ranks"] for each in found] == [2] * (NUM_KILLS + 1) + [3]
    assert found[-1]["hosts"] == {f"host{number}": 1 for number in range(3)}
    assert json.loads((run / "summary.json").read_text())["state"] == "finished"


def test_rows_of_ray_data_train(tmp_path):
    with TemporaryDirectory() as short, hosts(2, tmp_path) as (*nodes, switch):
        cluster = RayCluster(nodes, switch, tmp_path, short)
        words = [sys.executable, "-c", ON_RAY_DATA, tmp_path]
        code = cluster.popen(switch, words).wait(timeout=240)
        assert code == 0, cluster.printed()
    assert "reported 20" in cluster.printed()
    summary = json.loads((tmp_path / "runs" / "rows" / "summary.json").read_text())
    assert (summary["state"], summary["ranks"], summary["samples"]) == ("finished", 2, 800)


def test_features_are_fitted_in_tasks_of_a_cluster(tmp_path):
    write_shop(tmp_path)
    words = [sys.executable, "-m", "meshrec", "fit", SHOP, "--data.train", tmp_path, "--out"]
    with TemporaryDirectory() as short, hosts(2, tmp_path) as (*nodes, switch):
        cluster = RayCluster(nodes, switch, tmp_path, short)
        fit = cluster.popen(switch, [*words, tmp_path / "ray", "--on", "ray"])
        assert fit.wait(timeout=240) == 0, cluster.printed()
    subprocess.run([*words, tmp_path / "here"], check=True)
    for name in ("features.json", "features.arrow"):
        assert (tmp_path / "ray" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()
