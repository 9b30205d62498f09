"""Whole hosts are killed under torchrun. The run goes on, and ends with the bits of one that was left
alone.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from meshrec.planner import load_plan
from meshrec.train.run_folder import RunFolder
from tests.hosts.namespaces import (
    STEPS_A_LIFE,
    Host,
    hosts,
    kills,
    makes_hosts,
    needs_hosts,
    num_kills,
    send,
    until,
)
from tests.hosts.runs import ENVIRONMENT, alone, bits, metrics, train

pytestmark = needs_hosts
NUM_KILLS = num_kills(8)


def options(epochs):
    return ["--training.checkpoint-every", 10, "--training.epochs", epochs, "--training.phases-every", 0]


def in_shared(folder, epochs):
    """The words of a run in the shared folder."""
    return train("--out", folder / "shared", "--name", "mine", *options(epochs))


def agent(
    host: Host, store: Host, folder: Path, words: list[str], nodes: str, ranks: int = 2
) -> "subprocess.Popen[str]":
    """Start torchrun on a host that is up."""
    words = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes),
        *("--nproc-per-node", str(ranks)),
        *("--rdzv-id", "kills", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{store.address}:29400"),
        *("--rdzv-conf", "is_host=0", "--max-restarts", "100", "--monitor-interval", "0.5"),
        *("--local-addr", host.address, *words),
    ]
    # A host that joins again waits in vain for the address that agents have shared before.
    environment = {**ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (folder / f"{host.name}.txt").open("a") as log:
        return host.popen(words, env=environment, stdout=log)


def keep_store(host: Host) -> "subprocess.Popen[str]":
    words = [sys.executable, "-m", "meshrec", "launch", "store", host.address]
    store = host.popen(words, env=ENVIRONMENT)
    assert store.stdout is not None
    while "listens at" not in (line := store.stdout.readline()):
        assert line
    return store


def step_of(run: Path) -> int:
    """The step of the last line of metrics that is there; 0 before it."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return json.loads(lines[-1])["step"] if lines else 0
    except (OSError, json.JSONDecodeError):
        return 0


def starts(run: Path) -> list[dict]:
    try:
        return json.loads((run / "config.json").read_text())["starts"]
    except (OSError, json.JSONDecodeError):
        return []


@makes_hosts
def test_killed_hosts_come_back(tmp_path):
    """A host is killed, starts again, and its ranks join: the world is the same, and so are the bits."""
    epochs = (NUM_KILLS + 1) * STEPS_A_LIFE // 10
    run, seconds = tmp_path / "shared" / "mine", []
    with hosts(2, tmp_path, rate="1gbit") as (*both, switch):
        store = keep_store(switch)
        words = in_shared(tmp_path, epochs)
        agents = [agent(host, switch, tmp_path, words, "2", ranks=1) for host in both]
        for wanted, number in kills(NUM_KILLS):
            until(
                lambda wanted=wanted: step_of(run) >= wanted,
                240,
                (tmp_path / "host0.txt").read_text()[-3000:],
            )
            before = len(starts(run))
            both[number].kill()
            agents[number].wait()
            killed = time.monotonic()
            both[number].boot()
            agents[number] = agent(both[number], switch, tmp_path, words, "2", ranks=1)
            until(
                lambda before=before: len(starts(run)) > before,
                240,
                (tmp_path / "host0.txt").read_text()[-3000:],
            )
            seconds.append(time.monotonic() - killed)
            print(
                f"host {number} killed near step {step_of(run)}, back after {seconds[-1]:.1f} s", flush=True
            )
        codes = [each.wait(timeout=400) for each in agents]
        send(store, signal.SIGKILL)
        store.communicate()
    assert codes == [0, 0], (tmp_path / "host0.txt").read_text()[-3000:]
    undisturbed = alone(tmp_path, 2, *options(epochs))
    assert bits(run) == bits(undisturbed)
    assert metrics(run) == metrics(undisturbed)
    print(f"{NUM_KILLS} kills; median {sorted(seconds)[NUM_KILLS // 2]:.1f} s, longest {max(seconds):.1f} s")


@makes_hosts
def test_the_world_shrinks_and_grows(tmp_path):
    run = tmp_path / "shared" / "mine"
    with hosts(2, tmp_path) as (*both, switch):
        store = keep_store(switch)
        words = in_shared(tmp_path, 100_000)
        agents = [agent(host, switch, tmp_path, words, "1:2") for host in both]
        until(lambda: step_of(run) > 30, 240)
        both[0].kill()  # rank 0's host, which held the run's folder
        agents[0].wait()
        until(lambda: starts(run)[-1]["ranks"] == 2, 240, (tmp_path / "host1.txt").read_text()[-3000:])
        shrunk = step_of(run)
        until(lambda: step_of(run) > shrunk + 30, 240)
        assert load_plan(run / "plan.json").inputs.topology.world_size == 2
        both[0].boot()
        agents[0] = agent(both[0], switch, tmp_path, words, "1:2")
        until(lambda: starts(run)[-1]["ranks"] == 4, 240, (tmp_path / "host1.txt").read_text()[-3000:])
        grown = step_of(run)
        until(lambda: step_of(run) > grown + 30, 240)
        for each in agents:
            send(each, signal.SIGTERM)
        for each in agents:
            each.wait(timeout=240)
        send(store, signal.SIGKILL)
        store.communicate()
    found = starts(run)
    assert [each["ranks"] for each in found[:1] + found[-2:]] == [4, 2, 4]
    assert found[-2]["hosts"] == {"host1": 2}
    assert found[-1]["hosts"] == {"host0": 2, "host1": 2}
    lasts = [each["from_step"] for each in found]
    assert lasts == sorted(lasts)
    assert lasts[-1] > 0
    assert load_plan(run / "plan.json").inputs.topology.world_size == 4
    assert RunFolder(run).state().name == "stopped"
    page = (run / "report.html").read_text()
    assert (
        json.loads(page.partition('type="application/json">')[2].partition("</script>")[0])["config"][
            "starts"
        ]
        == found
    )
