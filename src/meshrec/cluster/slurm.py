"""Write a Slurm batch script in which srun starts torchrun on every node, and the job restarts after
failures.

[Note: how a Slurm job ends early and resumes]
- Preemption and `scontrol requeue`: Slurm sends SIGTERM, waits (partition GraceTime, or KillWait), and
  requeues the job due to ``#SBATCH --requeue``.
- Time limit: Slurm sends SIGUSR1 to the script ``save_seconds`` earlier (``--signal=B:USR1@SECONDS``). The
  script sends SIGTERM to srun, and requeues the job when the ranks have ended.
- Node failure: Slurm requeues the job when it notices the failure. Usually ranks on other nodes fail first.
  The script then checks whether all nodes still start a process, and if not, requeues the job.
- Rank failure: the script requeues the job if a checkpoint was saved since the start, at most
  ``max_requeues`` times. If a run fails without progress, it ends with the ranks' exit code.

In the first two cases, torchrun forwards SIGTERM, and the ranks save a checkpoint. After every restart, under
the same job ID, the run resumes from the last checkpoint. `scancel` ends a job without requeueing it.
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
# `python -m` must not import a torch.py of this folder.
export PYTHONSAFEPATH=1
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
# sbatch options unless given: allow requeueing, and append to the log after a requeue instead of truncating
# it.
_DEFAULTS = {"requeue": None, "open-mode": "append"}
_KEY = re.compile(r"[a-z][a-z0-9-]*")


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """Settings of a training job on Slurm.

    Attributes:
        recipe: name or path of the recipe, as for `meshrec train`.
        arguments: further arguments for `meshrec train`.
        nodes: number of nodes.
        ranks_per_node: number of ranks on a node.
        name: job name.
        python: Python interpreter on the nodes.
        out: folder for runs, which all nodes can access.
        save_seconds: how many seconds before the time limit the run saves a checkpoint and ends.
        max_requeues: maximum restarts after failures.
        port: port on the first node at which the ranks meet; None: derived from the job ID.
        sbatch: further sbatch options, by long name, such as {"time": "12:00:00"}. The value None stands for
            an option without a value.
        environment: environment variables for the ranks.

    Raises:
        ValueError: ``nodes`` or ``ranks_per_node`` is below 1, or an ``sbatch`` key is not a long option.
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
                raise ValueError(f"--sbatch {key}: use a long sbatch option, such as time=12:00:00.")


def script(job: SlurmJob) -> str:
    """Return the text of the batch script for a job."""
    # sbatch options in the order in which the script lists them.
    options: dict[str, str | None] = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": "1",
        # B: only the batch script gets the signal, not the ranks.
        "signal": f"B:USR1@{job.save_seconds}",
        **_DEFAULTS,
        # Last, so the user's options replace the defaults.
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
    """Submit a batch script, and return the Slurm job ID.

    Raises:
        ValueError: sbatch is not installed, or rejects the script.
    """
    if shutil.which("sbatch") is None:
        raise ValueError(
            f"sbatch is not installed here. {path} was written: submit it on a Slurm machine with sbatch."
        )
    result = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ValueError(
            f"sbatch refused {path}: {result.stderr.strip()}. Change --sbatch options, or edit the script."
        )
    # The output is the job ID, or "ID;CLUSTER" on federated clusters.
    return result.stdout.strip().partition(";")[0]
