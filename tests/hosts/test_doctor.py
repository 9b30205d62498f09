"""`meshrec doctor` finds what is wrong with one of two hosts, and says what to do."""

import sys
from pathlib import Path

import pytest

from tests.hosts.namespaces import hosts, makes_hosts, needs_hosts
from tests.hosts.runs import ENVIRONMENT

pytestmark = needs_hosts
DOCTOR = "from meshrec.__main__ import command; command()"
LATE = "import time; now = time.time; time.time = lambda: now() - 30; "
OLDER = "import torch; torch.__version__ = '2.9.0'; "
RECIPE = """
from meshrec.data.features import Features, Hashed, Label
from meshrec.optim import RowWiseAdagrad
from meshrec.train import Csv, DenseOptimizer, DLRMConfig, Recipe, Training

def rated():
    features = Features(labels=(Label(column="y"),), features=(Hashed(name="a", num_embeddings=9),))
    return Recipe(
        name="rated",
        data=Csv(train=("OWN/x.csv",), features=features),
        model=DLRMConfig(embedding_dim=8, bottom=(8,), top=(8,)),
        tables=RowWiseAdagrad(lr=0.1),
        dense=DenseOptimizer(lr=0.01),
        training=Training(batch_size=10),
    )
"""
# What is done to the second host: a shell command, variables, code, and the check that must tell, with words
# of its remedy.
FAULTS = {
    "wrong interface": ("", {"GLOO_SOCKET_IFNAME": "eth7"}, "", "interface", "GLOO_SOCKET_IFNAME=eth0"),
    "loopback": ("", {"GLOO_SOCKET_IFNAME": "lo"}, "", "interface", "GLOO_SOCKET_IFNAME=eth0"),
    "unknown address": ("", {"MASTER_ADDR": "nowhere.invalid"}, "", "address of rank 0", "Name a host"),
    "blocked port": ("ip route add blackhole FIRST", {}, "", "address of rank 0", "open port"),
    "no shared folder": ("mount --bind PRIVATE SHARED", {}, "", "shared folder", "Mount one folder"),
    "read-only folder": (
        "mount -o ro,bind SHARED SHARED",
        {},
        "",
        "folder of runs",
        "another folder (--out)",
    ),
    "other version": ("", {}, OLDER, "version of torch", "Install the same torch"),
    "no kernels": ("", {"MESHREC_LIBRARY": "/none"}, "", "kernels", "Install the wheel"),
    "skewed clock": ("", {}, LATE, "clock", "chrony"),
    "small /dev/shm": ("mount -o remount,size=64m /dev/shm", {}, "", "/dev/shm", "--shm-size"),
    "few files": ("ulimit -n 256", {}, "", "open files", "ulimit -n"),
    "other data": ("sed -i s/1,b/1,c/ OWN/x.csv", {}, "", "data", "Copy the data from rank 0's host"),
    "no data": ("rm OWN/x.csv", {}, "", "data", "Copy or mount the data"),
    "slow link": (
        "tc qdisc add dev eth0 root tbf rate 50mbit burst 32kb latency 50ms",
        {},
        "",
        "bandwidth",
        "tc qdisc",
    ),
}


def examined(folder: Path, fault: str | None):
    shell, variables, code, _, _ = FAULTS[fault] if fault else ("", {}, "", "", "")
    own, shared = folder / "own", folder / "shared"
    shared.mkdir()
    (folder / "recipe.py").write_text(RECIPE.replace("OWN", str(own)))
    with hosts(2, folder) as (*both, _):
        for number in range(2):
            (folder / f"host{number}" / "x.csv").write_text("y,a\n" + "1,b\n0,d\n" * 50)
        shell = shell.replace("FIRST", both[0].address).replace("PRIVATE", str(folder / "host1"))
        shell = shell.replace("SHARED", str(shared)).replace("OWN", str(own))
        processes = []
        for rank, host in enumerate(both):
            environment = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
            environment |= {"MASTER_ADDR": both[0].address, "MASTER_PORT": "29511", "GROUP_RANK": str(rank)}
            environment |= variables if rank == 1 else {}
            words = [
                sys.executable,
                "-c",
                (code if rank == 1 else "") + DOCTOR,
                "doctor",
                f"{folder}/recipe.py:rated",
            ]
            words += ["--out", str(shared / "runs"), "--timeout", "25"]
            script = f'{(rank == 1 and shell) or ":"} || exit 9; exec "$@"'
            processes.append(
                host.popen(["bash", "-c", script, "bash", *words], env={**ENVIRONMENT, **environment})
            )
        printed = [process.communicate(timeout=240)[0] for process in processes]
    return [process.returncode for process in processes], printed


def rows_of(printed):
    """The rows of the doctor's table: check, level, ranks, found and remedy, whose words may lie on several
    lines.
    """
    found = []
    for line in printed.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("│").split("│")]
        if line.startswith("│") and len(cells) == 5:
            if cells[1]:
                found.append(cells)
            else:
                pairs = zip(found[-1], cells, strict=True)
                found[-1] = [f"{before} {cell}".strip() for before, cell in pairs]
    return found


def test_sound_hosts_are_found_sound(tmp_path):
    codes, printed = examined(tmp_path, None)
    assert codes == [0, 0], printed
    found = [row[3] for row in rows_of(printed[0])]
    for words in ("2 ranks have met", "Gb/s from rank"):
        assert any(words in text for text in found), printed[0]
    assert "found" not in printed[1]  # rank 0 tells for all


@makes_hosts
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(tmp_path, fault):
    codes, printed = examined(tmp_path, fault)
    *_, wanted, remedy = FAULTS[fault]
    rows = [row for text in printed for row in rows_of(text)]
    told = [row for row in rows if row[0].startswith(wanted) and row[1] in ("fail", "warn")]
    assert told, "\n".join(printed)
    assert any(remedy in row[4] for row in told), "\n".join(printed)
    assert max(codes) == int(any(row[1] == "fail" for row in rows)), (codes, printed)
