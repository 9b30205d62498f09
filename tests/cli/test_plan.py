import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshrec.cli.inspect import main as inspect
from meshrec.cli.plan import PlanOptions, main, run
from meshrec.cli.train import main as train
from meshrec.planner import get_profile, load_plan
from meshrec.planner.measured import PhaseTime, write_phases
from tests.train.shop import write_shop

FAST = {"max_work": 1e5, "ranks": 2, "hardware": "cpu"}


@pytest.fixture
def task(tmp_path):
    tables = [
        {"name": f"t{i}", "num_embeddings": 1000, "embedding_dim": 32, "pooling_factors": [2.0]}
        for i in range(3)
    ]
    path = tmp_path / "task.json"
    path.write_text(json.dumps({"task": "mine", "global_batch_size": 64, "tables": tables}))
    return path


def test_plan_save_and_explain(task, tmp_path, capsys):
    run(PlanOptions(source=task, out=tmp_path / "plan.json", html=tmp_path / "plan.html", **FAST))
    printed = capsys.readouterr().out.replace("\n", " ")
    assert "proven: no plan is" in printed
    assert f"the plan: {tmp_path / 'plan.json'} the page: {tmp_path / 'plan.html'}" in printed
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")
    run(PlanOptions(source=tmp_path / "plan.json", json=True))
    report = json.loads(capsys.readouterr().out)
    assert report["seconds"] == load_plan(tmp_path / "plan.json").seconds


def test_what_if_diff_and_compare(task, tmp_path, capsys):
    run(PlanOptions(source=task, out=tmp_path / "plan.json", what_if="ranks=1,4", **FAST))
    assert "samples/s" in capsys.readouterr().out
    run(PlanOptions(diff=(tmp_path / "plan.json", tmp_path / "plan.json")))
    assert "the plans place every table identically" in capsys.readouterr().out
    write_phases(tmp_path / "phases.jsonl", [PhaseTime("lookup", 0, 1.0)])
    run(PlanOptions(source=tmp_path / "plan.json", compare=tmp_path))
    assert "1000.000" in capsys.readouterr().out


def test_mistakes_are_named(task, tmp_path):
    with pytest.raises(ValueError, match=r"--diff.*OLD.*NEW"):
        run(PlanOptions())
    with pytest.raises(ValueError, match="neither"):
        run(PlanOptions(source=tmp_path / "nothing"))
    for ranks in ("nodes=3", "ranks=a", "ranks=2,0"):
        with pytest.raises(ValueError, match=f"--what-if.*'{ranks}'.*ranks=16.*32,64"):
            run(PlanOptions(source=task, what_if=ranks, **FAST))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"diff": ("a", "b"), "ranks": 2},
            "--diff.*--ranks",
        ),
        ({"diff": ("a", "b"), "source": "c"}, "--diff.*SOURCE"),
        ({"layouts": True, "html": "x.html"}, "--layouts.*--html"),
        ({"what_if": "ranks=2", "html": "x.html"}, "--what-if.*--html"),
        ({"compare": "run", "json": True}, "--compare.*--json"),
        ({"compare": "run", "what_if": "ranks=2"}, "--compare.*--what-if"),
    ],
)
def test_no_option_is_ignored(options, message):
    with pytest.raises(ValueError, match=message):
        run(PlanOptions(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "--ranks.*0.*1"),
        ({"ranks_per_node": -1}, "--ranks-per-node.*-1.*1"),
        ({"batch_size": 0}, "--batch-size.*0.*1"),
        ({"memory_gib": float("nan")}, "--memory-gib"),
        ({"time_limit": float("nan")}, "--time-limit"),
        ({"max_work": -1.0}, "--max-work.*-1"),
        ({"gap": -0.1}, r"--gap.*-0\.1"),
        ({"out": Path("nowhere/plan.json")}, "nowhere"),
        ({"html": Path(".")}, "folder"),
    ],
)
def test_options_are_checked_before_the_work(task, options, message):
    for source in (task, Path("tests/train/small.py:small")):
        with pytest.raises(ValueError, match=message):
            run(PlanOptions(source=source, **options))


def test_a_saved_plan_takes_no_other_machine(task, tmp_path):
    run(PlanOptions(source=task, out=tmp_path / "plan.json", **FAST))
    with pytest.raises(ValueError, match="--ranks"):
        run(PlanOptions(source=tmp_path / "plan.json", ranks=4))


def test_a_run_is_compared_with_its_own_plan(task, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    write_phases(folder / "phases.jsonl", [PhaseTime("lookup", 0, 1.0)])
    with pytest.raises(ValueError, match=r"plan\.json.*SOURCE"):
        run(PlanOptions(compare=folder))
    (folder / "config.json").write_text('{"ranks": 2}')
    run(PlanOptions(source=task, out=folder / "plan.json", **FAST))
    for compare in (folder, folder / "phases.jsonl"):
        capsys.readouterr()
        run(PlanOptions(compare=compare))
        assert "1000.000" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"2 ranks.*4.*SOURCE"):
        run(PlanOptions(source=task, compare=folder, **{**FAST, "ranks": 4}))


def test_a_recipe_is_planned_without_training(capsys):
    run(PlanOptions(source=Path("tests/train/small.py:small"), ranks=2, json=True))
    report = json.loads(capsys.readouterr().out)
    assert (report["world_size"], report["batch_size"], report["hardware"]) == (2, 50, "cpu")
    assert [table["name"] for table in report["tables"]] == ["f0", "f1", "f2"]
    with pytest.raises(ValueError, match=r"100.*among 3"):
        run(PlanOptions(source=Path("tests/train/small.py:small"), ranks=3))


@pytest.mark.parametrize(("built_in", "device"), [("cpu", "cpu"), ("h100", "cuda")])
def test_a_file_of_hardware_says_what_to_plan_for(task, tmp_path, built_in, device):
    get_profile(built_in).named("mine").save(tmp_path / "hardware.json")
    for source in (task, Path("tests/train/small.py:small")):
        options = {
            **FAST,
            "hardware": str(tmp_path / "hardware.json"),
            "out": tmp_path / "plan.json",
            "force": True,
        }
        run(PlanOptions(source=source, **options))
        plan = load_plan(tmp_path / "plan.json")
        assert plan.required_inputs().topology.compute_device == device


def test_layouts_of_a_recipe_are_compared(task, capsys):
    run(PlanOptions(source=Path("movielens_dlrm"), ranks=2, layouts=True))
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("data-parallel (DDP)", "sharded (FSDP2)", "2 stages, "))
    assert " wins, " in printed
    with pytest.raises(ValueError, match="--layouts"):
        run(PlanOptions(source=task, layouts=True))


def test_a_wire_format_makes_exchanges_cheaper(task, tmp_path, capsys):
    seconds = {}
    for wire in ("fp32", "fp16"):
        path = tmp_path / f"{wire}.json"
        run(PlanOptions(source=task, wire=wire, out=path, **FAST))
        plan = load_plan(path)
        assert {str(table.wire) for table in plan.required_inputs().tables} == {wire}
        seconds[wire] = plan.seconds
    assert seconds["fp16"] < seconds["fp32"]
    assert "of gradients, encoded as fp16" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--wire"):
        run(PlanOptions(source=path, wire="fp16"))
    with pytest.raises(ValueError, match="'fp8'"):
        run(PlanOptions(source=task, wire="fp8", **FAST))


def test_wire_auto_takes_what_the_bound_allows(task, tmp_path):
    wires = {}
    for name, bound in (("none", {"wire_auc_loss": 0.0}), ("error", {"wire_error": 0.2}), ("default", {})):
        path = tmp_path / f"{name}.json"
        run(PlanOptions(source=task, wire="auto", out=path, ranks_per_node=1, **bound, **FAST))
        wires[name] = {str(table.wire) for table in load_plan(path).required_inputs().tables}
    assert wires["none"] == {"fp32"}
    assert "int4/int8" in wires["error"]
    assert wires["default"] != wires["none"]
    with pytest.raises(ValueError, match="--wire"):
        run(PlanOptions(source=task, wire="int8", wire_error=0.1, **FAST))
    with pytest.raises(ValueError, match="0"):
        run(PlanOptions(source=task, wire="auto", wire_error=-0.1, **FAST))


def test_rows_across_nodes_and_packed_ids_are_priced(tmp_path, capsys):
    table = {"name": "t", "num_embeddings": 1_000_000, "embedding_dim": 64, "pooling_factors": [8.0]}
    task, path = tmp_path / "task.json", tmp_path / "plan.json"
    task.write_text(json.dumps({"task": "mine", "global_batch_size": 8192, "tables": [table]}))
    options = {
        **FAST,
        "ranks": 4,
        "ranks_per_node": 2,
        "source": task,
        "out": path,
        "force": True,
        "wire": "auto",
    }
    options["memory_gib"] = 0.2  # too little for the table on every rank
    sent, seconds = [], []
    for between in ({}, {"across_nodes": "rows"}, {"across_nodes": "rows", "packed_ids": True}):
        run(PlanOptions(**options, **between))
        plan = load_plan(path)
        sent.append(plan.estimate().sent_bytes["ids"])
        seconds.append(plan.seconds)
    assert sent[2] < sent[1] != sent[0]
    assert len(set(seconds)) == 3
    assert "of IDs" in capsys.readouterr().out
    for option, value in {"across_nodes": "rows", "packed_ids": True}.items():
        with pytest.raises(ValueError, match=f"{option.replace('_', '-')}"):
            run(PlanOptions(source=path, **{option: value}))
    with pytest.raises(ValueError, match=r"across_nodes.*'rows'"):
        run(PlanOptions(**options, packed_ids=True))


def test_memory_and_time_are_predicted_from_counts(capsys):
    assert main(["--data", "rows=1e9", "users=2e7", "items=2e6", "--ranks", "4"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "1,000,000,000" in printed
    assert "extrapolated 5.0x" in printed
    assert "samples_per_second=N" in printed
    words = ["rows=1000", "values=50", "text_values=9", "width=8", "samples_per_second=10"]
    assert main(["--data", *words, "--memory-gib", "0.1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["size"]["table_rows"] == 59
    assert report["total"]["training"] == pytest.approx(100, abs=0.1)
    assert main(["--data", *words, "--memory-gib", "0.1"]) == 0
    assert "exceed the 0.1 GB" in " ".join(capsys.readouterr().out.split())


def test_memory_and_time_are_predicted_for_a_recipe_and_a_run(tmp_path, capsys):
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, 40, 600), rng.integers(0, 30, 600)
    pq.write_table(pa.table({"user": users, "item": items, "time": np.arange(600)}), tmp_path / "log.parquet")
    (tmp_path / "recipe.py").write_text(
        "from meshrec.optim import Adam\n"
        "from meshrec.train import HSTUConfig, Log, NextItem, Recipe, Training\n"
        "def recipe():\n"
        "    return Recipe(\n"
        "        name='next', data=Log(log=('log.parquet',), history=10),\n"
        "        model=HSTUConfig(embedding_dim=8), loss=NextItem(),\n"
        "        tables=Adam(lr=1e-3), training=Training(batch_size=8, epochs=2),\n"
        "    )\n"
    )
    recipe = f"{tmp_path / 'recipe.py'}:recipe"
    assert main([recipe, "--data", "recipe", "--json"]) == 0
    size = json.loads(capsys.readouterr().out)["size"]
    assert (size["rows"], size["users"], size["items"]) == (600, len(set(users)), len(set(items)))
    assert (size["epochs"], size["in_histories"], size["row_bytes"]) == (2, False, 96)
    assert size["samples_per_second"] is None
    assert train([recipe, "--runs", str(tmp_path), "--name", "part", "--quiet"]) == 0
    capsys.readouterr()
    assert main([str(tmp_path / "part"), "--data", "rows=60000", "items=300", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["size"]["samples"] == 100 * size["samples"]
    assert report["size"]["table_rows"] == round(size["table_rows"] * 300 / size["items"])
    assert report["size"]["samples_per_second"] > 0
    assert report["total"]["training"] > 0
    with pytest.raises(ValueError, match=r"values=3.*log"):
        main([recipe, "--data", "values=3"])


def test_values_of_a_table_are_counted(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    write_shop(tmp_path / "data", 300)
    out = tmp_path / "r.py"
    assert inspect([str(tmp_path / "data"), "--label", "clicked", "--out", str(out)]) == 0
    capsys.readouterr()
    assert main([f"{out}:recipe", "--data", "recipe", "--json"]) == 0
    size = json.loads(capsys.readouterr().out)["size"]
    assert size["rows"] == pq.read_table(tmp_path / "data").num_rows
    assert size["values"] + size["text_values"] > 0
    assert size["users"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["users=5", "items=3"], "rows=COUNT"),
        (["rows=5", "users=3"], "items=COUNT"),
        (["rows=5", "users=3", "items=3", "values=2"], "values"),
        (["rows=0"], "rows=0.*'0'"),
        (["rows=1.5"], "rows=1.5"),
        (["rows=many"], "'many'"),
        (["rows=1", "rows=2"], "twice"),
        (["row=5"], "row=5.*Did you mean rows"),
        (["rows=5", "--out", "x.json"], "--data.*--out"),
    ],
)
def test_mistakes_in_counts_are_named(words, message):
    with pytest.raises(ValueError, match=message):
        main(["--data", *words])
