"""Real brokers for tests: Debian's redis-server, and the cluster for tests that librdkafka has."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import confluent_kafka as kafka
import pytest
import redis

_KAFKA = """
import sys
from confluent_kafka.admin import AdminClient

# The cluster lives in this client, and listens on ports of this host.
client = AdminClient({"bootstrap.servers": "none:1", "test.mock.num.brokers": 1, "log_level": 0})
brokers = client.list_topics(timeout=30).brokers.values()
print(*(f"{broker.host}:{broker.port}" for broker in brokers), flush=True)
sys.stdin.read()
"""


class RedisServer:
    """A server that listens on a socket in its folder. If it is killed, it keeps all that it acknowledged."""

    def __init__(self, folder):
        if shutil.which("redis-server") is None:
            pytest.fail("there is no redis-server: apt-get install redis-server")
        self.folder, self.process = folder, None
        self.start()

    def start(self):
        options = ["--port", "0", "--unixsocket", "socket", "--save", "", "--appendonly", "yes"]
        # By default, it acknowledges entries before it writes them while another write is synced to disk.
        options += ["--appendfsync", "always"]
        with open(self.folder / "log", "ab") as log:
            command = ["redis-server", *options, "--dir", str(self.folder)]
            self.process = subprocess.Popen(command, stdout=log, cwd=self.folder)
        self.client = redis.Redis(unix_socket_path=str(self.folder / "socket"), retry=None)
        while True:
            try:
                self.client.ping()
                break
            except redis.exceptions.ConnectionError:
                assert self.process.poll() is None, (self.folder / "log").read_text()
                time.sleep(0.01)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def address(self, *streams, options=""):
        return f"unix://{self.folder}/socket?db=0&stream={','.join(streams)}{options}"

    def add(self, stream, rows, ids=None):
        """Add a JSON entry per row, and return their IDs."""
        pipeline = self.client.pipeline()
        for row, key in zip(rows, ids or ["*"] * len(rows), strict=True):
            pipeline.xadd(stream, {"json": json.dumps(row)}, id=key)
        return [key.decode() for key in pipeline.execute()]


class KafkaCluster:
    """librdkafka's cluster for tests, in a process. A topic has four partitions, from its first use."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", _KAFKA], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.hosts = self.process.stdout.readline().strip()
        self.producer = kafka.Producer({"bootstrap.servers": self.hosts, "linger.ms": 1, "log_level": 0})

    def address(self, topic):
        return f"kafka://{self.hosts}/{topic}?fetch.wait.max.ms=10"

    def add(self, topic, rows, partition=0, times=None):
        """Add a JSON record per row."""
        for row, at in zip(rows, times or [0] * len(rows), strict=True):
            self.add_payload(topic, json.dumps(row).encode(), partition, at)
        # A record that is not delivered would be waited for.
        assert self.producer.flush(60) == 0, "the cluster does not answer"

    def add_payload(self, topic, payload, partition=0, at=0):
        while True:
            try:
                return self.producer.produce(topic, payload, partition=partition, timestamp=at)
            except BufferError:
                self.producer.poll(0.1)

    def pause(self):
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self):
        os.kill(self.process.pid, signal.SIGCONT)

    def close(self):
        with self.process:  # closes its pipes
            self.process.kill()


@pytest.fixture
def redis_server(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def kafka_cluster():
    cluster = KafkaCluster()
    yield cluster
    cluster.close()
