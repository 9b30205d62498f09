"""Loading what fits: a table with more rows continues, under any plan, and everything else starts again."""

import contextlib
import importlib.util
from pathlib import Path
from unittest import mock

import pytest
import torch

from meshrec import fuse
from meshrec.checkpoint import save
from meshrec.checkpoint.saving import load_matching

_spec = importlib.util.spec_from_file_location("checkpoint_models", Path(__file__).parent / "models.py")
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)

GROWN = {"t0": (21, 8), "t1": (9, 4), "t2": (13, 6)}


@contextlib.contextmanager
def sizes(**changes):
    with mock.patch.object(models, "SIZES", {**GROWN, **changes}):
        yield


def saved(kind, optimizer, folder):
    model, dense = models.make(kind, optimizer, hashed=True)
    models.train(model, dense, range(3), hashed=True)
    save(folder / "saved", models.state_of(model, dense))
    return models.whole_state(model, dense)


def loaded(kind, optimizer, folder, **options):
    with sizes():
        model, dense = models.make(kind, optimizer, hashed=True)
        before = models.whole_state(model, dense)
        differences = load_matching(folder / "saved", models.state_of(model, dense), **options)
        after = models.whole_state(model, dense)
        models.train(model, dense, range(3, 4), hashed=True)
    return before, after, differences


@pytest.mark.parametrize(
    ("kind", "other", "optimizer"), [("rw", "cw", "adam"), ("mix", "grid", "rowwise"), ("tw", "dp", "adam")]
)
def test_rows_continue_under_another_plan_and_new_rows_start(ranks, tmp_path, kind, other, optimizer):
    expected = ranks(2).run(saved, kind, optimizer, tmp_path)[0]
    results = ranks(4).run(loaded, other, optimizer, tmp_path)
    assert len({str(differences) for *_, differences in results}) == 1
    before, after, differences = results[0]
    assert differences.grown == {"t0": (16, 21), "t2": (12, 13)}
    assert (differences.fresh, differences.dropped, differences.fresh_state) == ({}, [], [])
    assert expected.keys() == after.keys()
    for name, value in after.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or ".h." in name:
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected[name])), name
            continue
        num = len(expected[name])
        assert torch.equal(value[:num], expected[name]), name
        if len(value) > num:
            assert torch.equal(value[num:], before[name][num:]), name


def test_tables_alone_and_without_one_of_them(ranks, tmp_path):
    expected = ranks(2).run(saved, "rw", "adam", tmp_path)[0]
    options = {"fresh_tables": ["t0", "h"], "tables_only": True}
    before, after, differences = ranks(2).run(loaded_with, "tw", tmp_path, options)[0]
    weight = "ebc.embedding_bags.{}.weight".format
    assert differences.fresh.keys() == {weight("t0"), weight("h"), "over.weight", "over.bias"}
    assert torch.equal(after[weight("t1")], expected[weight("t1")])
    for name in (weight("t0"), "over.weight", f"tables.{weight('t0')}.exp_avg"):
        assert torch.equal(after[name], before[name])
    assert len(after[weight("h")]) == 0
    assert "dense.0.exp_avg" not in after


def loaded_with(kind, folder, options):
    return loaded(kind, "adam", folder, **options)


def unsharded():
    model = fuse(models.Model(), optimizer=models.SPECS["adam"])
    return model, torch.optim.Adam(model.over.parameters(), lr=0.01)


def test_unsharded_models_and_errors(tmp_path):
    model, dense = unsharded()
    models.train(model, dense, range(2))
    save(tmp_path, models.state_of(model, dense))
    expected = models.whole_state(model, dense)
    with sizes():
        other = unsharded()
        load_matching(tmp_path, models.state_of(*other))
        after = models.whole_state(*other)
    for name, value in expected.items():
        found, expected_value = torch.as_tensor(after[name]), torch.as_tensor(value)
        found = found[: len(expected_value)] if expected_value.dim() else found
        assert torch.equal(found, expected_value), name
    with sizes(t1=(9, 5)):
        wide = models.Model()
        before = {name: value.clone() for name, value in wide.state_dict().items()}
        with pytest.raises(ValueError, match=r"'t1' has 5 columns.* 4"):
            load_matching(tmp_path, {"model": wide})
        assert models.differences(dict(wide.state_dict()), before) == []
    # Fewer rows cannot keep their meaning, and start again.
    with sizes(t1=(8, 4)):
        few = models.Model()
        before = few.ebc.embedding_bags["t1"].weight.clone()
        differences = load_matching(tmp_path, {"model": few})
        assert differences.fresh == {"ebc.embedding_bags.t1.weight": ((9, 4), (8, 4))}
        assert torch.equal(few.ebc.embedding_bags["t1"].weight, before)
