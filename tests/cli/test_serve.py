import pytest

from meshrec.cli import serve


def made(folder):
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    return folder


def test_models_are_called_after_their_folder_or_as_asked(tmp_path):
    folder = made(tmp_path / "clicks")
    assert serve.parse_packages([str(folder), f"other={folder}"]) == {"clicks": folder, "other": folder}


def test_the_remedy_for_a_run_without_a_package_names_a_folder_that_is_free(tmp_path):
    run = tmp_path / "clicks"
    run.mkdir()
    (run / "config.json").write_text("{}")
    (tmp_path / "clicks-package").mkdir()
    out = tmp_path / "clicks-package-package"
    remedy = f"Make one with `meshrec export {run} --out {out}`, then serve {out}"
    with pytest.raises(ValueError, match=remedy):
        serve.parse_packages([str(run)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["clicks", "clicks"], "'clicks'"),
        (["=clicks"], "model"),
        (["a/b=clicks"], "'a/b'"),
        (["nothing"], "nothing"),
        ([], "model"),
    ],
)
def test_models_that_cannot_be_are_named(tmp_path, monkeypatch, arguments, message):
    made(tmp_path / "clicks")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        serve.parse_packages(arguments)


def test_options_reach_the_server(tmp_path, monkeypatch):
    folder, token = made(tmp_path / "clicks"), tmp_path / "token"
    token.write_text("secret\n")
    calls = []
    monkeypatch.setattr(serve, "serve", lambda *given, **named: calls.append((given, named)))
    monkeypatch.setenv(serve.TOKEN, "other")
    assert serve.main([str(folder), "--port", "0", "--max-batch", "7", "--workers", "3"]) == 0
    assert serve.main([str(folder), "--token-file", str(token), "--max-queue", "9"]) == 0
    (models, options), named = calls[0]
    assert models == {"clicks": folder}
    assert (options.port, options.limits.max_batch, options.token) == (0, 7, "other")
    assert named == {"workers": 3}
    assert (calls[1][0][1].token, calls[1][0][1].limits.max_queue) == ("secret", 9)
