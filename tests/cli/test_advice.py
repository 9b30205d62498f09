"""Commands and options that messages name: they exist."""

import ast
import dataclasses
import functools
import re
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
import tyro

from meshrec.cli import (
    calibrate,
    checkpoint,
    delta,
    doctor,
    embed,
    evaluate,
    explain,
    export,
    fit,
    follow,
    inspect,
    join,
    launch,
    leaderboard,
    plan,
    predict,
    quantize,
    recipe,
    recommend,
    runs,
    serve,
    similar,
    train,
    tune,
)
from meshrec.cli.__main__ import COMMANDS
from meshrec.optim.optimizers import SPECS
from meshrec.train import RECIPES, resolve

SOURCE = Path(__file__).parents[2] / "src" / "meshrec"
OPTIONS = {
    "calibrate": [calibrate.CalibrateOptions],
    "checkpoint": [checkpoint.Command],
    "delta": [delta.VerifyOptions],
    "doctor": [doctor.DoctorOptions],
    "embed": [embed.EmbedOptions],
    "evaluate": [evaluate.EvaluateOptions],
    "explain": [explain.ExplainOptions],
    "export": [export.ExportOptions],
    "fit": [fit.FitOptions],
    "follow": [follow.FollowOptions],
    "inspect": [inspect.InspectOptions],
    "join": [join.JoinOptions],
    "launch": [
        launch.SlurmOptions,
        launch.KubernetesOptions,
        launch.ServeManifestOptions,
        launch.StoreOptions,
    ],
    "leaderboard": [leaderboard.LeaderboardOptions],
    "plan": [plan.PlanOptions],
    "predict": [predict.PredictOptions],
    "quantize": [quantize.QuantizeOptions],
    "recipe": [recipe.ToYamlOptions],
    "recommend": [recommend.RecommendOptions],
    "similar": [similar.SimilarOptions],
    "runs": [runs.RunsOptions, runs.CompareOptions, runs.RemoveOptions],
    "serve": [serve.ServeOptions],
    "train": [train.TrainOptions],
    "tune": [tune.TuneOptions],
}
OTHER_PROGRAMS = {
    *("--logdir", "--batch-size"),
    # torchrun
    *("--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port"),
    *("--rdzv-id", "--rdzv-backend", "--rdzv-conf", "--rdzv-endpoint"),
    # sbatch and srun
    *(
        "--parsable",
        "--requeue",
        "--kill-on-bad-exit",
        "--ntasks",
        "--ntasks-per-node",
        "--overlap",
        "--export",
    ),
    # unshare, nsenter, setpriv and mount, and docker
    *("--bind", "--fork", "--kill-child", "--pid", "--mount", "--mount-proc", "--uts", "--net", "--wd"),
    "--pdeathsig",
    "--shm-size",
}


def option_names(kind, prefix=""):
    """Yield the options of a dataclass, or of all dataclasses of a union: ``--training.batch-size``."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if not dataclasses.is_dataclass(kind):
        for member in get_args(kind):
            yield from option_names(member, prefix)
        return
    hints = get_type_hints(kind if isinstance(kind, type) else type(kind), include_extras=True)
    for option in dataclasses.fields(kind):
        hint = hints[option.name]
        notes = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        if tyro.conf.Positional in notes:
            continue
        # ``from_`` is an option that is a word of Python.
        name = f"{prefix}{option.name.rstrip('_').replace('_', '-')}"
        value = option.default if isinstance(kind, type) else getattr(kind, option.name)
        inner = value if dataclasses.is_dataclass(value) else get_args(hint)[0] if notes else hint
        if dataclasses.is_dataclass(inner) and not hasattr(inner, "from_json"):
            yield from option_names(inner, f"{name}.")
        else:
            yield f"--{name}"
            if hint is bool:
                yield f"--{prefix}no-{option.name.replace('_', '-')}"


def of_recipes():
    """The options of all recipes: of a field of theirs, those of every class that stands in one of them."""
    for name in RECIPES:
        yield from option_names(resolve(name))
    for kind in SPECS:
        yield from option_names(kind, "tables.")


@pytest.fixture(scope="module")
def known():
    recipes = {*of_recipes(), "--help", "--help-all", "--version"}
    return {
        name: {each for kind in kinds for each in option_names(kind)} | recipes
        for name, kinds in OPTIONS.items()
    }


@functools.cache
def texts():
    """Each text of the source with its place; what is computed in it is "X"."""
    return [*_texts()]


def _texts():
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [str(each.value) if isinstance(each, ast.Constant) else "X" for each in node.values]
                yield f"{path.name}:{node.lineno}", "".join(parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{path.name}:{node.lineno}", node.value


def options_in(text):
    return re.findall(r"(?<![\w`-])--[a-z][a-z0-9_-]*(?:\.[a-z0-9_-]+)*(?![\w.]*[A-Z])", text)


def test_every_command_is_looked_at():
    assert set(OPTIONS) == set(COMMANDS)


def test_an_option_that_a_text_names_exists(known):
    every = set().union(*known.values()) | OTHER_PROGRAMS
    wrong = {
        f"{place}: {option}" for place, text in texts() for option in options_in(text) if option not in every
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_a_command_that_a_text_names_exists_with_its_options(known):
    wrong, num = [], 0
    for place, text in texts():
        for name, rest in re.findall(r"(?<!`)`meshrec ([a-z]+)\b([^`]*)`", text):
            num += 1
            if name not in COMMANDS:
                wrong.append(f"{place}: meshrec {name}")
                continue
            wrong += [f"{place}: {name} {each}" for each in options_in(rest) if each not in known[name]]
    assert num > 20
    assert not wrong, "\n".join(wrong)
