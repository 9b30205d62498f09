"""Runs on a cluster of Ray whose two nodes are hosts of their own: killed workers and nodes, and more
workers.
"""

import json
import os
import random
import sys
import time

import pytest

from tests.hosts.namespaces import hosts, makes_hosts, needs_hosts, until
from tests.hosts.runs import ENVIRONMENT, RECIPE, bits, metrics
from tests.hosts.test_elastic import starts, step_of

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = [needs_hosts, makes_hosts]
NUM_KILLS = min(3, int(os.environ.get("MESHREC_HOSTS", "0")))
OPTIONS = ["--training.checkpoint-every", "10", "--training.phases-every", "0"]
RAY = f"{os.path.dirname(sys.executable)}/ray"


class RayCluster:
    """A head on the switch, without workers, and a node on every host."""

    def __init__(self, nodes, switch, folder):
        self.nodes, self.switch, self.folder = nodes, switch, folder
        self.environment = {**ENVIRONMENT, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
        self.environment["RAY_ADDRESS"] = f"{switch.address}:6379"
        self.environment["RAY_health_check_period_ms"] = "1000"
        self.log = (folder / "ray.txt").open("a")
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
        command = [RAY, "start", *words, *common, f"--temp-dir=/tmp/r{host.address}"]
        host.popen(command, env=environment, stdout=self.log).wait(timeout=240)

    def start_node(self, node, cpus=2):
        self._start(node, f"--address={self.switch.address}:6379", f"--num-cpus={cpus}")

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
        return self.switch.popen([*words, *OPTIONS, *options], env=self.environment, stdout=self.log)


def test_killed_nodes_and_a_third_worker(tmp_path):
    rng, run, seconds = random.Random(2), tmp_path / "shared" / "mine", []
    epochs = 20 * (NUM_KILLS + 1)
    with hosts(2, tmp_path) as (*nodes, switch):
        cluster = RayCluster(nodes, switch, tmp_path)
        known = ["--training.epochs", epochs, "--training.batch-size", 96]
        options = ["--name", "mine", "--num-workers", 2, "--max-restarts", 100, *known]
        alone = cluster.train(*options[2:], "--name", "alone")
        assert alone.wait(timeout=500) == 0, (tmp_path / "ray.txt").read_text()[-4000:]
        training = cluster.train(*options)
        for kill in range(NUM_KILLS):
            wanted = kill * 120 + rng.randrange(20, 100)
            until(lambda wanted=wanted: step_of(run) >= wanted, 400, tmp_path / "ray.txt")
            before, number = len(starts(run)), rng.randrange(2)
            nodes[number].kill()
            killed = time.monotonic()
            nodes[number].boot()
            cluster.start_node(nodes[number])
            until(lambda before=before: len(starts(run)) > before, 400, tmp_path / "ray.txt")
            seconds.append(time.monotonic() - killed)
            print(f"node {number} killed, back after {seconds[-1]:.1f} s", flush=True)
        assert training.wait(timeout=500) == 0, (tmp_path / "ray.txt").read_text()[-4000:]
        assert bits(run) == bits(tmp_path / "shared" / "alone")
        assert metrics(run) == metrics(tmp_path / "shared" / "alone")
        more = ["--name", "mine", "--resume", "--num-workers", 3, "--training.epochs", epochs + 4]
        assert cluster.train(*more).wait(timeout=500) == 0, (tmp_path / "ray.txt").read_text()[-4000:]
    found = starts(run)
    assert [each["ranks"] for each in found] == [2] * (NUM_KILLS + 1) + [3]
    assert json.loads((run / "summary.json").read_text())["state"] == "finished"
