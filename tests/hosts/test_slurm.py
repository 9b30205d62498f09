"""`meshrec launch slurm` on a cluster of two nodes: preempted, out of time, and with killed nodes."""

import sys
import time

import pytest

from tests.hosts.namespaces import STEPS_A_LIFE, hosts, kills, makes_hosts, needs_hosts, num_kills, until
from tests.hosts.runs import RECIPE, alone, bits, metrics
from tests.hosts.slurm import MISSING, cluster
from tests.hosts.test_elastic import starts, step_of

pytestmark = [
    needs_hosts,
    makes_hosts,
    pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed: there is no {', '.join(MISSING)}"),
]
NUM_KILLS = num_kills(6)
OPTIONS = ["--training.checkpoint-every", "10", "--training.phases-every", "0"]
EPOCHS = 60


def submit(found, folder, epochs, ranks):
    words = ["launch", "slurm", RECIPE, "--nodes", "2", "--ranks-per-node", ranks, "--out", folder / "shared"]
    words += ["--script", folder / "job", "--sbatch", f"output={folder}/job.txt"]
    printed = found.run(
        sys.executable, "-m", "meshrec", *words, "--", "--name", "mine", *OPTIONS, "--training.epochs", epochs
    )
    return printed.split()[1]


def evaluations(run):
    """The lines of evaluations: a run that is stopped logs one more line of training."""
    return [line for line in metrics(run) if line["kind"] != "train"]


def test_a_job_is_preempted_and_runs_out_of_time(tmp_path):
    run = tmp_path / "shared" / "mine"
    with hosts(2, tmp_path) as (*nodes, switch), cluster(nodes, switch, tmp_path / "slurm") as found:
        job = submit(found, tmp_path, EPOCHS, 2)
        for number, words in enumerate((["requeue", job], None)):
            until(lambda number=number: len(starts(run)) == number + 1, 200, lambda: found.state(job))
            wanted = step_of(run) + 40
            until(lambda wanted=wanted: step_of(run) >= wanted, 200)
            if words is not None:
                found.run("scontrol", *words)  # as a preemption does: SIGTERM, then the queue
            else:
                found.run("scancel", "--batch", "--signal=USR1", job)  # as the time limit does
            until(lambda: found.state(job) == "PENDING", 120)
        state = found.wait_for(job, {"COMPLETED", "FAILED", "CANCELLED"}, 300)
        printed = (tmp_path / "job.txt").read_text()
    assert state == "COMPLETED", printed
    assert "the time limit is near" in printed
    assert len(starts(run)) == 3
    other = alone(tmp_path, 4, *OPTIONS, "--training.epochs", EPOCHS)
    assert bits(run) == bits(other)
    assert evaluations(run) == evaluations(other)


def test_killed_nodes(tmp_path):
    run, seconds = tmp_path / "shared" / "mine", []
    epochs = (NUM_KILLS + 1) * STEPS_A_LIFE // 10
    with hosts(2, tmp_path) as (*nodes, switch), cluster(nodes, switch, tmp_path / "slurm") as found:
        job = submit(found, tmp_path, epochs, 1)
        for wanted, number in kills(NUM_KILLS):
            until(
                lambda wanted=wanted: step_of(run) >= wanted,
                300,
                (tmp_path / "slurm/slurmctld.log").read_text()[-2000:],
            )
            before = len(starts(run))
            nodes[number].kill()
            killed = time.monotonic()
            until(lambda: found.state(job) == "PENDING", 180)
            nodes[number].boot()
            found.start_node(nodes[number])
            found.wait_for(job, {"RUNNING"}, 180)
            running = time.monotonic()
            until(lambda before=before: len(starts(run)) > before, 200)
            seconds.append(time.monotonic() - running)
            print(
                f"node {number} killed: Slurm runs the job after {running - killed:.1f} s, the run goes on "
                f"{seconds[-1]:.1f} s later",
                flush=True,
            )
        state = found.wait_for(job, {"COMPLETED", "FAILED", "CANCELLED"}, 400)
        printed = (tmp_path / "job.txt").read_text()
    assert state == "COMPLETED", printed
    other = alone(tmp_path, 2, *OPTIONS, "--training.epochs", epochs)
    assert bits(run) == bits(other)
    assert metrics(run) == metrics(other)
