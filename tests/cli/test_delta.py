import pytest

from meshrec.cli import delta
from meshrec.cli.arguments import UsageError
from tests.serve.test_fresh import damage, publish


def test_deltas_are_verified(tmp_path, capsys):
    assert delta.main(["verify", str(tmp_path)]) == 0
    assert "holds no deltas yet" in capsys.readouterr().out
    for number in (1, 2):
        publish(tmp_path, number, ids=[1, 2, 3])
    assert delta.main(["verify", str(tmp_path)]) == 0
    assert "2 deltas of run r, steps (0, 20], 6 rows: sound" in capsys.readouterr().out
    damage(tmp_path, "00000002.dense.safetensors")
    assert delta.main(["verify", str(tmp_path)]) == 1
    assert "delta 2: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "command"), (["verfy"], "'verfy'")],
)
def test_the_only_command_is_named(arguments, message):
    with pytest.raises(UsageError, match=message):
        delta.main(arguments)


def test_the_help_explains_the_folder(capsys):
    with pytest.raises(SystemExit) as ended:
        delta.main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "Name or folder of a run" in told
    assert "--training.publish-every" in told
    assert "meshrec delta verify movielens_dlrm-001" in told
