import pytest
import yaml

from meshrec.cli.arguments import UsageError
from meshrec.cli.launch import main


def test_slurm_prints_its_script(capsys):
    options = ["--nodes", "2", "--sbatch", "time=1:00:00", "exclusive", "--env", "A=b", "--dry-run"]
    assert main(["slurm", "small", *options, "--", "--training.epochs", "3"]) == 0
    printed = capsys.readouterr().out
    assert "#SBATCH --time=1:00:00\n#SBATCH --exclusive\n" in printed
    assert "export A=b\n" in printed
    assert "meshrec train small --out runs --quiet --training.epochs 3" in printed


def test_slurm_writes_a_script_where_there_is_no_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"meshrec\.sbatch"):
        main(["slurm", "small"])
    assert (tmp_path / "meshrec.sbatch").stat().st_mode & 0o100


@pytest.mark.parametrize("kind", ["jobset", "pytorchjob"])
def test_kubernetes(capsys, kind):
    assert main(["k8s", "small", "--image", "i:1", "--kind", kind, "--", "--training.epochs", "3"]) == 0
    manifest = yaml.safe_load(capsys.readouterr().out)
    assert manifest["kind"].lower() == kind
    assert "--training.epochs" in str(manifest)


def test_a_server(capsys):
    assert main(["k8s-serve", "films", "--image", "i:1"]) == 0
    kinds = [each["kind"] for each in yaml.safe_load_all(capsys.readouterr().out)]
    assert kinds == ["Deployment", "Service", "HorizontalPodAutoscaler"]


def test_mistakes(capsys):
    with pytest.raises(UsageError, match="mean"):
        main(["slum", "small"])
    with pytest.raises(UsageError, match="NAME=VALUE"):
        main(["k8s", "small", "--image", "i", "--env", "x"])
    with pytest.raises(ValueError, match="listen"):
        main(["store", "192.0.2.1"])
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert "slurm" in capsys.readouterr().out
