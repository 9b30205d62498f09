"""Ranks that were not started alike do not train together."""

import os
import re
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from meshrec.data.features import Features, Hashed, Label
from meshrec.runs import same_start
from meshrec.runs.same_start import describe_dataset, describe_start
from meshrec.train import Csv, SyntheticClicks
from tests.forked import ForkedProgram
from tests.runs.differing import compare_with_a_change
from tests.train.clicks import Clicks, write_clicks

ROOT = Path(__file__).parents[2]

KINDS = [
    "version of meshrec",
    "version of torch",
    "version of kernels",
    "variable MESHREC_ISA",
    "option rank_timeout",
    "training.seed",
]


@pytest.mark.parametrize("kind", [*KINDS, None])
def test_what_differs_is_named_on_every_rank(ranks, small, kind):
    told = ranks(2).run(compare_with_a_change, small(), str(kind))
    assert told[0] == told[1]
    if kind is None:
        assert told[0] is None
    else:
        assert f"the ranks were not started alike: {kind} is " in told[0]
        assert " on rank 0 and " in told[0]
        assert " on rank 1. Start all ranks with the same command" in told[0]


def test_ranks_with_one_value_are_named_together():
    assert same_start._format_by_rank(["1", "2", "1"]) == "1 on rank 0, 2 and 2 on rank 1"
    many = same_start._format_by_rank(["1"] * 20)
    assert many == "1 on rank 0, 1, 2, 3, 4, 5, 6, 7, ..."


def test_a_description_is_the_same_in_every_process(run_code, small):
    """Neither addresses of objects nor the order of sets say anything."""
    recipe = replace(small(), data=replace(small().data, exponent={"a", "b", "c"}), loss=lambda: 0)
    script = (
        "import dataclasses; from small import small; "
        "from meshrec.runs.same_start import describe_start; r = small(); "
        "data = dataclasses.replace(r.data, exponent={'c', 'b', 'a'}); "
        "r = dataclasses.replace(r, data=data, loss=lambda: 0); "
        "print({k: v for k, v in describe_start(r, None, {}).items() if k.startswith(('data', 'training'))})"
    )
    done = run_code(script, cwd=ROOT / "tests" / "train", PYTHONHASHSEED="1")
    mine = describe_start(recipe, None, {})
    assert done.stdout.strip() == str(
        {name: value for name, value in mine.items() if name.startswith(("data", "training"))}
    )


def test_files_are_told_by_name_size_and_ends(tmp_path, small, monkeypatch):
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        write_clicks(folder / "train.parquet", 300)
        write_clicks(folder / "test.parquet", 100)
    here, there = (replace(small(), data=Clicks(folder=folder)) for folder in (one, other))
    assert describe_start(here, None, {}) == describe_start(there, None, {})  # the same data lies elsewhere
    assert describe_dataset(here.data.load()) == describe_dataset(there.data.load())
    content = bytearray((other / "test.parquet").read_bytes())
    content[-9] ^= 1
    (other / "test.parquet").write_bytes(content)
    mine, theirs = (describe_start(each, None, {}) for each in (here, there))
    assert {name for name in mine if mine[name] != theirs[name]} == {"data.folder: test.parquet"}
    monkeypatch.chdir(other)
    nowhere = describe_start(replace(small(), data=Clicks()), None, {})
    assert not any("parquet" in name for name in nowhere)  # the working folder is no folder of data
    (tmp_path / "x.csv").write_text("a\n1\n")
    features = Features(labels=(Label(column="y"),), features=(Hashed(name="a", num_embeddings=9),))
    csv = replace(small(), data=Csv(train=(str(tmp_path / "x.csv"),), features=features))
    assert any(name.endswith(": x.csv") for name in describe_start(csv, None, {}))


def test_loaded_data_is_described(small):
    found = describe_dataset(SyntheticClicks(num_samples=100, num_validation=50).load())
    assert found["data.samples.train"] == 100
    assert found != describe_dataset(SyntheticClicks(num_samples=101, num_validation=50).load())


def by_hand(tmp_path, *arguments):
    """Two ranks as users start them on two terminals, each with arguments of its own: codes, errors."""
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        port = each.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    processes = [
        ForkedProgram(
            "meshrec.__main__:main",
            ["train", *mine, "--runs", tmp_path / "runs"],
            cwd=ROOT,
            environment={
                **environment,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": f"{ROOT}:{ROOT}/src",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stderr=subprocess.PIPE,
        )
        for rank, mine in enumerate(arguments)
    ]
    errors = []
    for process in processes:
        with process.stderr as stderr:
            errors.append(stderr.read())
    return [process.wait(300) for process in processes], errors


def test_ranks_with_other_options_data_source_or_plan_do_not_train(tmp_path):
    """The recipe's own file is the same; one that it imports differs, as do options, data and plan."""
    arguments, other = [], ["--tables.lr", "0.2", "--training.batch-size", "50"]
    for rank in range(2):
        folder = tmp_path / f"rank{rank}"
        (folder / "data").mkdir(parents=True)
        write_clicks(folder / "data" / "train.parquet", 600, seed=rank)
        write_clicks(folder / "data" / "test.parquet", 100)
        (folder / "mine.py").write_text("from neighbour import recipe\n")
        source = (ROOT / "tests" / "train" / "clicks.py").read_text()
        (folder / "neighbour.py").write_text(source + rank * "# changed\n")
        (folder / "plan.json").write_text(f'{{"version": 1, "rank": {rank}}}')
        named = ["--data.folder", f"{folder}/data", "--placement.plan", f"{folder}/plan.json"]
        arguments.append([f"{folder}/mine.py:recipe", *named, *(other if rank else [])])
    codes, errors = by_hand(tmp_path, *arguments)
    assert codes == [1, 1], errors
    for text in errors:
        assert "the ranks were not started alike: data.folder: train.parquet is " in text
        assert "test.parquet is" not in text
        assert "tables.lr is 0.1 on rank 0 and 0.2 on rank 1" in text.replace("'", "")
        assert "training.batch_size is 100 on rank 0 and 50 on rank 1" in text.replace("'", "")
        assert re.search(r"source neighbour.py is '\w{16}' on rank 0 and '\w{16}' on rank 1", text), text
        plan = r"placement.plan is '\d+ bytes \w{16}' on rank 0 and '\d+ bytes \w{16}' on rank 1"
        assert re.search(plan, text), text
        assert "mine.py is" not in text
        assert "Traceback" not in text
    assert not list((tmp_path / "runs").iterdir())
