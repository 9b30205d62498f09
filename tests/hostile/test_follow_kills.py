"""A followed stream while all of its processes are killed: no event lost or twice, no server without a model.

Two streams of a Redis server are trained on two ranks, whose deltas a server applies. At random times, the
command, a rank, the Redis server or the server is killed, and starts again.

Only `make hostile` runs it, as each start takes seconds. ``MESHREC_HOSTILE=1000`` kills 50 times, which takes
about fifteen minutes on two busy cores; ``MESHREC_SEED`` draws other times.
"""

import contextlib
import functools
import http.client
import json
import os
import random
import signal
import threading
import time

import pytest
import redis
from safetensors.torch import load_file

from meshrec.checkpoint import CheckpointManager, read_manifest
from meshrec.checkpoint.delta_files import delta_numbers, verify_deltas
from meshrec.data.broker_stream import BrokerStream
from meshrec.data.brokers import id_order
from meshrec.data.features import TimedFeatures
from meshrec.data.open_stream import stream_dataset
from meshrec.testing.rank_pool import RankPool
from meshrec.train.ranks import join
from meshrec.train.run_folder import RunFolder
from meshrec.train.stream_options import StreamOptions
from meshrec.train.stream_trainer import StreamTrainer
from tests.data.broker_servers import redis_server  # noqa: F401 - a fixture
from tests.forked import ForkedProgram
from tests.hostile.damage import NUMBER, Tally
from tests.hostile.faulty_ranks import MESHREC, PATIENCE, ROOT, end, environment, ranks_of
from tests.hostile.second.programs import Program, port_of
from tests.train.events import FEATURES, events, recipe, write_events

KILLS = NUMBER * 50 // 1000
SEED = int(os.environ.get("MESHREC_SEED", "0"))
RECIPE = "tests/train/events.py:recipe"
OFTEN = ("--checkpoint-minutes", "0.02", "--delta-seconds", "0.5", "--log-seconds", "0.5")
STREAMS = ("a", "b")
STEP = recipe().training.batch_size
# 50 kills took 891 s on two cores at load 10, and more than the 900 s of other tests at load 12.
pytestmark = [pytest.mark.skipif(not KILLS, reason="takes minutes"), pytest.mark.timeout(3600)]


def until(condition, reason, *, moves=lambda: 0):
    """Wait for a condition, as long as ``moves()`` changes."""
    last, deadline = moves(), time.monotonic() + PATIENCE
    while not condition():
        if moves() != last:
            last, deadline = moves(), time.monotonic() + PATIENCE
        assert time.monotonic() < deadline, reason
        time.sleep(0.02)


class Worker(threading.Thread):
    """A thread that repeats something until the end of a context, which raises its error."""

    def __init__(self, repeat, seconds):
        super().__init__()
        self._repeat, self._seconds = repeat, seconds
        self._stopped = threading.Event()
        self.error = None

    def run(self):
        try:
            while not self._stopped.wait(self._seconds):
                self._repeat()
        except BaseException as error:
            self.error = error

    def check(self):
        if self.error is not None:
            raise self.error

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self._stopped.set()
        self.join()


class Writer:
    """Writes events to random streams, each once, although the server is killed meanwhile."""

    def __init__(self, server, seed):
        self._server, self._rng, self.num = server, random.Random(seed), 0

    def write(self, num=None):
        """Write a few events, or ``num``."""
        name, num = self._rng.choice(STREAMS), num or self._rng.randint(1, 12)
        rows = events(self.num, num).to_pylist()
        while not self._attempt(name, rows):
            time.sleep(0.01)
        self.num += num

    def _attempt(self, name, rows):
        try:
            newest = self._server.client.xrevrange(name, count=1)
            # The server may have been killed between the entries and its answer.
            if not newest or json.loads(newest[0][1][b"json"])["number"] != rows[-1]["number"]:
                self._server.add(name, rows)
        except redis.exceptions.ConnectionError:
            return False
        return True


class Follower:
    """``meshrec follow``, which is resumed after a kill has ended it. It must not end otherwise."""

    def __init__(self, folder, address):
        self.runs, self.run, self.num_starts = folder, folder / "live", 0
        # For the export, which reads the types of the recipe's columns.
        write_events(folder.parent / "past", 0, 1)
        self._words = [RECIPE, address, "--data.train", folder.parent / "past"]
        self._words += ["--time", "ts", "--nproc", "2", *OFTEN]
        self.start()

    def start(self):
        words = ["--resume"] if self.num_starts else self._words
        # By turns, the command restarts killed ranks itself.
        words = [*words, "--max-restarts", self.num_starts % 2]
        self._log = self.runs.parent / f"follow{self.num_starts}.log"
        with self._log.open("w") as log:
            self.process = ForkedProgram(
                MESHREC,
                ["follow", *words, "--name", "live", "--runs", self.runs, "--quiet"],
                cwd=ROOT,
                environment=environment(),
                stderr=log,
            )
        self.num_starts, self._is_killed = self.num_starts + 1, False

    def go_on(self):
        """Resume the run if it has ended."""
        if self.process.poll() is not None:
            # Ranks of a killed command save a last checkpoint. Until they have ended, a resume is refused.
            assert self._is_killed or "is in use" in self._log.read_text(), self._log.read_text()
            self.start()

    def kill(self, rank=None):
        """Kill the command, or a rank; return False if it does not run."""
        pid = self.process.pid if rank is None else ranks_of(self.process.pid).get(rank)
        if pid is None or self.process.poll() is not None:
            return False
        self._is_killed = True
        os.kill(pid, signal.SIGKILL)
        return True

    def lines(self):
        """Return the metrics lines about training."""
        return [line for line in RunFolder(self.run).metrics() if line["kind"] == "train"]

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(PATIENCE) == 128 + signal.SIGINT, self._log.read_text()


class Server:
    """``meshrec serve``, which is asked all the time, and starts again when it was killed."""

    def __init__(self, package, run, folder):
        self._words = ["serve", package, "--deltas", f"{package.name}={run}", "--port", "0"]
        self._folder, self.num_starts, self.num_answers = folder, 0, 0
        self.start()

    def start(self):
        """Start until it is ready, as a kill may come before."""
        while True:
            log = self._folder / f"serve{self.num_starts}.log"
            with log.open("w") as file:
                process = ForkedProgram(
                    MESHREC, self._words, cwd=ROOT, environment=environment(), stderr=file
                )
            self.program = program = Program(process, log)
            self.num_starts += 1
            self._version = ("", -1)
            try:
                program.wait_until(functools.partial(self._is_ready, program), "readiness")
                return
            except AssertionError:
                if process.poll() != -signal.SIGKILL:
                    raise

    @staticmethod
    def _is_ready(program):
        return port_of(program) != 0 and program.is_ready()

    def ask(self):
        """Ask once: all answers have a version, and later ones no earlier one."""
        try:
            sample = {"price": 0.5, "user": self.num_answers, "item": self.num_answers % 120}
            status, body = self.program.ask("POST", "/predict", sample)
        except (OSError, http.client.HTTPException):
            # Only the kill may take the connection away, and then it comes back.
            self.program.process.wait(PATIENCE)
            assert self.program.process.poll() == -signal.SIGKILL, self.program.told()
            self.start()
            return
        assert status == 200, body
        package, _, delta = json.loads(body)["version"].partition("+")
        version = (package, int(delta or 0))
        assert version[0] == (self._version[0] or version[0])
        assert version[1] >= self._version[1], (version, self._version)
        self._version = version
        self.num_answers += 1

    def freshness(self):
        return self.program.ask("GET", f"/v2/models/{self._words[1].name}/freshness")[1].decode()

    def scores(self):
        samples = [{"price": n / 40, "user": 1000 * n, "item": n} for n in range(40)]
        return [json.loads(self.program.ask("POST", "/predict", sample)[1])["scores"] for sample in samples]

    def kill(self):
        # Not by its object, whose exit code another thread waits for.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.program.process.pid, signal.SIGKILL)


class StepCollector:
    """Collects the positions of all steps from the step log, which is pruned at checkpoints."""

    def __init__(self, path):
        self._path, self._positions = path, {}

    def collect(self):
        with contextlib.suppress(FileNotFoundError):
            for line in self._path.read_bytes().split(b"\n")[1:-1]:
                if position := json.loads(line):
                    self._positions[line] = [
                        (id_order(position[name][0]), position[name][1]) for name in STREAMS
                    ]

    def __len__(self):
        return len(self._positions)

    def write(self, path):
        """Write a step log of all steps."""
        lines = sorted(self._positions, key=self._positions.__getitem__)
        path.parent.mkdir(parents=True)
        path.write_bytes(b"\n".join([json.dumps({"step_rows": STEP}).encode(), b"{}", *lines, b""]))


def train_again(address, out):
    """Train the steps of a log, without interruption."""
    features = TimedFeatures(FEATURES, "ts")
    stream = BrokerStream(address, features, step_log=out / "steps.jsonl")
    trainer = StreamTrainer(
        recipe(),
        stream_dataset(stream, features),
        stream,
        join("cpu"),
        options=StreamOptions(stop_when_idle=1e-3, delta_seconds=None, checkpoint_minutes=1e9),
        folder=RunFolder(out),
    )
    trainer.run()


def trained(run):
    """Return number of samples and position of the last checkpoint, and the bytes of all trained tensors."""
    folder = CheckpointManager(run / "checkpoints").latest()
    progress = read_manifest(folder).values["progress"]["content"]
    tensors = {}
    # Checksums depend on a tensor's place in its file, and so on the windows of metrics.
    for path in folder.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            if not name.startswith(("windows", "random")):
                tensors[path.name.rpartition("-")[2], name] = tensor.numpy().tobytes()
    assert tensors
    return progress["num_samples"], progress["position"], tensors


def export(run, package):
    words = ["export", run, "--last", "--no-compile", "--out", package]
    log = run.parent / "export.log"
    with log.open("w") as file:
        program = ForkedProgram(MESHREC, words, cwd=ROOT, environment=environment(), stderr=file)
    assert program.wait(PATIENCE) == 0, log.read_text()


def kill_all(redis_server, follower, server, steps, rng, tally):  # noqa: F811
    """Yield after kills at random times, after which all processes come back."""
    targets = [("command", "rank", "redis", "server")[number % 4] for number in range(KILLS)]
    rng.shuffle(targets)
    num_steps = 0
    for target in targets:
        is_trainer = target in ("command", "rank")
        # Mostly while it trains, and sometimes while it starts.
        if is_trainer and rng.random() < 0.75:
            until(lambda before=num_steps: follower.go_on() or len(steps) > before, "no further step")
        pause = time.monotonic() + rng.uniform(0.1, 3)
        while time.monotonic() < pause:
            follower.go_on()
            time.sleep(0.02)
        tally.tried += 1
        if target == "redis":
            redis_server.kill()
            time.sleep(rng.uniform(0, 0.5))
            redis_server.start()
        elif target == "server":
            server.kill()
        else:
            rank = None if target == "command" else rng.randrange(2)
            until(lambda rank=rank: follower.go_on() or follower.kill(rank), f"no rank {rank}")
            num_steps = len(steps)
        yield


def test_kills_lose_no_event_and_leave_no_server_without_a_model(redis_server, tmp_path, capsys):  # noqa: F811
    start, rng, tally = time.monotonic(), random.Random(SEED), Tally("kills of a followed stream")
    address = redis_server.address(*STREAMS)
    writer = Writer(redis_server, SEED)
    writer.write(50 * STEP)
    follower = Follower(tmp_path / "runs", address)
    try:
        until(lambda: CheckpointManager(follower.run / "checkpoints").latest() is not None, "no checkpoint")
        follower.stop()  # or it would soon remove the checkpoint that is exported
        export(follower.run, tmp_path / "model")
        follower.start()
        steps = StepCollector(RunFolder(follower.run).steps)
        server = Server(tmp_path / "model", follower.run, tmp_path)
        try:
            with Worker(steps.collect, 0.1) as collecting, Worker(server.ask, 0.01) as asking:
                with Worker(writer.write, 0.05) as writing:
                    for _ in kill_all(redis_server, follower, server, steps, rng, tally):
                        for worker in (collecting, asking, writing):
                            worker.check()
                writing.check()
                writer.write(-writer.num % STEP or STEP)

                def is_drained():
                    follower.go_on()
                    lines = follower.lines()
                    return lines and lines[-1]["step"] * STEP == writer.num

                until(is_drained, f"not all {writer.num} events", moves=lambda: len(steps))
                follower.stop()
                last = delta_numbers(follower.run / "deltas")[-1]
                asking.check()
                until(lambda: asking.error or f'"delta":{last},' in server.freshness(), "no last delta")
            collecting.check()
            asking.check()
            assert len(steps) * STEP == writer.num
            compare(redis_server, follower, server, steps, writer, tmp_path)
        finally:
            end(server.program.process)
    finally:
        end(follower.process)
    tally.finish()
    with capsys.disabled():
        print(
            f"\nseed {SEED}: {KILLS} kills, {writer.num:,} events, {follower.num_starts} starts of the "
            f"command, {server.num_starts} of the server, {server.num_answers:,} answers, "
            f"{time.monotonic() - start:.0f} s"
        )


def compare(redis_server, follower, server, steps, writer, folder):  # noqa: F811
    """Compare with an uninterrupted run: weights, samples, metrics, and the scores of the server."""
    steps.write(folder / "runs" / "whole" / "steps.jsonl")
    with RankPool(2, timeout_seconds=10 * PATIENCE) as ranks:
        ranks.run(train_again, redis_server.address(*STREAMS), folder / "runs" / "whole")
    assert trained(follower.run) == trained(folder / "runs" / "whole")
    assert trained(follower.run)[0] == writer.num
    lines = follower.lines()
    assert lines[-1]["samples@day"] == writer.num
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines})
    assert verify_deltas(follower.run / "deltas")[-1].step * STEP == writer.num
    export(follower.run, folder / "exported" / "model")
    again = Server(folder / "exported" / "model", follower.run, folder / "exported")
    try:
        assert again.scores() == server.scores()
    finally:
        end(again.program.process)
