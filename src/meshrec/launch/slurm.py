"""A batch script for Slurm: srun starts torchrun on every node, and a job that loses a node is queued
again.

[Note: how a job ends early, and comes back]

- Preemption and `scontrol requeue`: Slurm sends SIGTERM, waits (GraceTime of the partition, or KillWait),
  and queues the job again, which has ``#SBATCH --requeue``.
- Time limit: Slurm sends SIGUSR1 to the script some seconds before (``--signal=B:USR1@SECONDS``); the script
  queues the job again itself.
- A node that fails: Slurm queues the job again once it knows. The ranks of the other nodes usually fail
  before, and the script then asks whether all nodes still start a process; if not, it queues the job again
  itself.
- A rank that fails: the script queues the job again if a checkpoint was saved since it started, at most
  ``max_requeues`` times. A run that fails without getting further ends, with the exit code of its ranks.

In the first two cases torchrun passes SIGTERM on, and the ranks save a checkpoint. Each time the job starts
again, under the same job ID, the run goes on from its last checkpoint. `scancel` ends a job for good.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_TEMPLATE = """\
#!/bin/bash
# Trains {recipe} on {nodes} nodes with {ranks} ranks each. Made by `meshrec launch slurm`.
{directives}

set -u
began=$(date +%s)
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Where the ranks meet: a port that other jobs on this node do not take.
port={port}
# A job that starts again has the same ID, by which it finds its run and goes on from the last checkpoint.
export MESHREC_LAUNCH="slurm-$SLURM_JOB_ID"
{environment}
asked=""
stop() {{ asked=$1; kill -TERM "$step" 2>/dev/null; }}
trap 'stop USR1' USR1  # the time limit is near
trap 'stop TERM' TERM  # preempted: Slurm itself queues the job again

srun --nodes={nodes} --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c '
  exec {python} -m torch.distributed.run --nnodes "$SLURM_NNODES" --nproc-per-node {ranks} \\
    --node-rank "$SLURM_NODEID" --master-addr "$0" --master-port "$1" "${{@:2}}"
' "$first" "$port" -m meshrec train {arguments} &
step=$!

# A signal ends `wait`, and the ranks need some time for their checkpoint.
while :; do
  wait "$step"
  kill -0 "$step" 2>/dev/null || break
done
wait "$step"
code=$?
if [ "$asked" = USR1 ]; then
  again="the time limit is near"
elif [ "$code" -eq 0 ] || [ -n "$asked" ] || [ "${{SLURM_RESTART_COUNT:-0}}" -ge {max_requeues} ]; then
  again=""
elif ! timeout 60 srun --overlap --nodes={nodes} --ntasks-per-node=1 true 2>/dev/null; then
  again="a node does not answer"
elif [ -n "$(find {out} -path "*/checkpoints/*/manifest.json" -newermt "@$began" -print -quit)" ]; then
  again="a rank failed after a checkpoint"
fi
if [ -n "${{again:-}}" ]; then
  echo "$again: job $SLURM_JOB_ID is queued again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
_DEFAULTS = {"requeue": None, "open-mode": "append"}
_KEY = re.compile(r"[a-z][a-z0-9-]*")


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A training job for Slurm.

    Attributes:
        recipe: the recipe, as `meshrec train` takes it.
        arguments: further arguments of `meshrec train`.
        nodes: the number of nodes.
        ranks_per_node: the number of ranks on each node.
        name: the name of the job.
        python: the interpreter on the nodes.
        out: the folder of runs that all nodes reach.
        save_seconds: seconds before the time limit at which the run saves a checkpoint and ends.
        max_requeues: how often the script queues the job again after a failure.
        port: the port on which ranks meet; if none, one that depends on the job's ID.
        sbatch: further options of sbatch, by their long name; None: an option without a value.
        environment: variables for the ranks.

    Raises:
        ValueError: there are no nodes or ranks, or a key of ``sbatch`` is not a long option.
    """

    recipe: str
    arguments: Sequence[str] = ()
    nodes: int = 1
    ranks_per_node: int = 1
    name: str = "meshrec"
    python: str = "python"
    out: str = "runs"
    save_seconds: int = 120
    max_requeues: int = 20
    port: int | None = None
    sbatch: Mapping[str, str | None] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks_per_node < 1:
            raise ValueError(
                f"{self.nodes} nodes with {self.ranks_per_node} ranks each: both must be at least 1."
            )
        for key in self.sbatch:
            if not _KEY.fullmatch(key):
                raise ValueError(f"--sbatch {key}: take a long option of sbatch, such as time=12:00:00.")


def script(job: SlurmJob) -> str:
    """Return the batch script of a job."""
    options: dict[str, str | None] = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": "1",
        "signal": f"B:USR1@{job.save_seconds}",
        **_DEFAULTS,
        **job.sbatch,
    }
    directives = [
        f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={value}"
        for name, value in options.items()
    ]
    variables = [f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()]
    return _TEMPLATE.format(
        recipe=job.recipe,
        nodes=job.nodes,
        ranks=job.ranks_per_node,
        max_requeues=job.max_requeues,
        out=shlex.quote(job.out),
        python=shlex.quote(job.python),
        port=job.port if job.port is not None else "$((20000 + SLURM_JOB_ID % 12000))",
        directives="\n".join(directives),
        environment="\n".join(variables),
        arguments=shlex.join([job.recipe, "--out", job.out, "--quiet", *job.arguments]),
    )


def submit(path: Path) -> str:
    """Send a batch script to Slurm, and return the ID of the job.

    Raises:
        ValueError: there is no sbatch, or it refuses the script.
    """
    if shutil.which("sbatch") is None:
        raise ValueError(
            f"there is no sbatch on this machine. {path} is written: submit it where Slurm is, with sbatch."
        )
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(
            f"sbatch refuses {path}: {done.stderr.strip()}. Change --sbatch options, or edit the script."
        )
    return done.stdout.strip().partition(";")[0]
