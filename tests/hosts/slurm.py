"""A Slurm cluster on hosts made of namespaces: slurmctld on the switch, and a slurmd on every host."""

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from tests.hosts.namespaces import Host, until
from tests.hosts.runs import ENVIRONMENT

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue")
MISSING = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
_CONFIG = """\
ClusterName=mr
SlurmctldHost=switch
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerParameters=bf_interval=5,sched_interval=5,defer_batch
SlurmdTimeout=15
SlurmctldTimeout=15
KillWait=30
ReturnToService=2
MailProg=/bin/true
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
JobRequeue=1
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """The cluster; commands run on its switch, as on a login node."""

    def __init__(self, nodes: list[Host], switch: Host, folder: Path) -> None:
        self.nodes, self._switch, self.folder = nodes, switch, folder
        self.environment = {**ENVIRONMENT, "SLURM_CONF": str(folder / "slurm.conf")}
        self.environment["PATH"] = f"{self.environment['PATH']}:/usr/sbin"

    def start(self) -> None:
        for name in ("state", *(f"spool/{node.name}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        cores = os.cpu_count()
        lines = [
            f"NodeName={node.name} NodeAddr={node.address} CPUs={cores} State=UNKNOWN" for node in self.nodes
        ]
        text = _CONFIG.format(folder=self.folder, nodes="\n".join(lines))
        (self.folder / "slurm.conf").write_text(text)
        # These hosts have no cgroups; processes are followed by their parents.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        names = {"socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        paths = [f"--{option}={self.folder / name}" for option, name in names.items()]
        logs = [f"--log-file={self.folder}/munge.log", f"--key-file={key}", "--force"]
        self._switch.run(["munged", *paths, *logs], env=self.environment)
        self._switch.run(["slurmctld", "-c"], env=self.environment)
        for node in self.nodes:
            self.start_node(node)
        until(lambda: self.run("sinfo", "-h", "-o", "%t %D").split() == ["idle", str(len(self.nodes))], 90)

    def start_node(self, node: Host) -> None:
        node.run(["slurmd", "-N", node.name], env=self.environment)

    def run(self, *words: object) -> str:
        return self._switch.run(list(words), env=self.environment).strip()

    def state(self, job: str) -> str:
        """The state of a job, such as RUNNING."""
        for word in self.run("scontrol", "show", "job", job).split():
            if word.startswith("JobState="):
                return word.partition("=")[2]
        return "UNKNOWN"

    def wait_for(self, job: str, states: set[str], seconds: float) -> str:
        deadline = time.monotonic() + seconds
        while (state := self.state(job)) not in states:
            assert time.monotonic() < deadline, (
                f"{state}\n{(self.folder / 'slurmctld.log').read_text()[-3000:]}"
            )
            time.sleep(0.3)
        return state


@contextlib.contextmanager
def cluster(nodes: list[Host], switch: Host, folder: Path) -> Iterator[Cluster]:
    folder.mkdir(parents=True, exist_ok=True)
    found = Cluster(nodes, switch, folder)
    found.start()
    yield found  # its daemons end with their hosts
