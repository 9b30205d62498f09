import subprocess

import pytest

from meshrec.cluster import SlurmJob, script, slurm, submit


def test_the_script(tmp_path):
    job = SlurmJob(
        recipe="mine.py:clicks",
        arguments=["--training.epochs", "2", "--name", "it's"],
        nodes=4,
        ranks_per_node=8,
        sbatch={"time": "1:00:00", "exclusive": None, "open-mode": "truncate"},
        environment={"GLOO_SOCKET_IFNAME": "ib 0"},
    )
    text = script(job)
    assert "#SBATCH --nodes=4\n" in text
    assert "#SBATCH --time=1:00:00\n#SBATCH --exclusive\n" in text
    assert "#SBATCH --requeue\n#SBATCH --open-mode=truncate\n" in text
    assert "export GLOO_SOCKET_IFNAME='ib 0'\n" in text
    assert "meshrec train mine.py:clicks --out runs --quiet --training.epochs 2 --name 'it'\"'\"'s'" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert all(len(line) <= 110 for line in text.splitlines() if "meshrec train" not in line)


@pytest.mark.parametrize("wrong", [{"nodes": 0}, {"ranks_per_node": 0}, {"sbatch": {"two words": "1"}}])
def test_wrong_jobs(wrong):
    with pytest.raises(ValueError, match=r"at least 1|long sbatch option"):
        SlurmJob(recipe="x", **wrong)


def test_submitting(tmp_path, monkeypatch):
    path = tmp_path / "job"
    monkeypatch.setattr(slurm.shutil, "which", lambda _: None)
    with pytest.raises(ValueError, match="machine"):
        submit(path)
    monkeypatch.setattr(slurm.shutil, "which", lambda name: name)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    fake = tmp_path / "sbatch"
    fake.write_text('#!/bin/sh\necho "17;cluster"\n')
    fake.chmod(0o755)
    assert submit(path) == "17"
    fake.write_text("#!/bin/sh\necho no such partition >&2; exit 1\n")
    with pytest.raises(ValueError, match="partition"):
        submit(path)
