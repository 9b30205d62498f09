from dataclasses import replace

import pytest
import torch

from meshrec.train import DenseOptimizer, Trainer, join
from meshrec.train.observers import Reported
from meshrec.train.precision import choose_precision, native_bf16
from meshrec.train.recipe import Training
from meshrec.train.run_folder import RunFolder

CPU = torch.device("cpu")


def trained(recipe, **options):
    trainer = Trainer(recipe, recipe.data.load(), join("cpu"), **options)
    trainer.run()
    return trainer


def with_precision(recipe, precision, **training):
    return replace(recipe, training=replace(recipe.training, dense_precision=precision, **training))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16\n", "AVX512-BF16"),
        ("flags\t\t: avx512_bf16 amx_bf16 amx_tile\n", "AMX"),
        ("Features\t: fp asimd bf16 i8mm\n", "Arm BF16"),
        ("flags\t\t: fpu avx2 avx512f\nmodel name\t: bf16\n", None),
    ],
)
def test_native_products_are_read_from_the_cpu_s_flags(tmp_path, text, name):
    (tmp_path / "cpuinfo").write_text(text)
    assert native_bf16(CPU, tmp_path / "cpuinfo") == name


def test_without_a_description_a_cpu_counts_as_without_bf16(tmp_path):
    assert native_bf16(CPU, tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("setting", "units", "bf16", "said"),
    [
        ("fp32", ["AMX"], False, None),
        ("bf16", ["AMX"], True, "AMX"),
        ("auto", ["AMX"], True, "AMX"),
        ("bf16", [None], True, "slower"),
        ("auto", [None], False, "rank 0"),
        ("auto", ["AMX", None], False, "rank 1"),
    ],
)
def test_auto_takes_bf16_where_every_rank_has_it_and_says_so(monkeypatch, setting, units, bf16, said):
    ranks = join("cpu")
    monkeypatch.setattr(type(ranks), "collect", lambda self, value: units)
    chosen = choose_precision(setting, ranks)
    assert chosen.bf16 is bf16
    assert chosen.reason is None if said is None else said in chosen.reason


def test_bf16_trains_nearly_as_well_and_reports_the_loss_in_both_precisions(small):
    recipe, said = small(epochs=3), []
    exact, rounded = trained(recipe), trained(with_precision(recipe, "bf16"), observer=said.append)
    assert rounded.validation["auc"] == pytest.approx(exact.validation["auc"], abs=0.02)
    assert rounded.validation["loss"] != exact.validation["loss"]
    assert exact.loss_check is None
    check = rounded.loss_check
    assert check.samples == 400
    assert 0 < abs(check.difference) < 0.01
    assert check.fp32 == pytest.approx(rounded.validation["loss"], rel=1e-5)  # evaluations compute in fp32
    lines = [event.text for event in said if isinstance(event, Reported)]
    assert any("dense part in bf16" in line for line in lines)
    assert any(f"{check.bf16:.6f}" in line and f"{check.fp32:.6f}" in line for line in lines)


def test_small_updates_reach_the_weights(small):
    """At this rate an update is far below bf16's resolution of the weights."""
    recipe = replace(small(epochs=1), dense=DenseOptimizer(kind="sgd", lr=1e-4))
    before = {
        name: weight.detach().clone()
        for name, weight in Trainer(recipe, recipe.data.load(), join("cpu")).built.dense.params.items()
    }
    after = trained(with_precision(recipe, "bf16")).built.dense.params
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert moved == list(before)
    rounds_away = [
        name for name in moved if torch.equal(before[name].bfloat16(), after[name].detach().bfloat16())
    ]
    assert rounds_away


@pytest.mark.parametrize(("first", "then"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_a_checkpoint_holds_fp32_and_resumes_in_the_other_precision(small, tmp_path, first, then):
    folder = RunFolder(tmp_path / "run")
    recipe = with_precision(small(epochs=2), first, max_steps=6, checkpoint_every=6)
    weights = trained(recipe, folder=folder).built.dense.params
    other = with_precision(recipe, then, max_steps=8)
    trainer = Trainer(other, other.data.load(), join("cpu"), folder=folder)
    assert trainer.resume()
    assert trainer.progress.step == 6
    for name, weight in trainer.built.dense.params.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, weights[name])
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in weights.values())
    trainer.run()
    assert trainer.progress.step == 8


def weights_after(recipe):
    return {name: weight.detach() for name, weight in trained(recipe).built.dense.params.items()}


def test_gradients_may_be_exchanged_in_bf16(ranks, small):
    recipe = small(max_steps=4, epochs=1)
    rounded = replace(recipe, training=replace(recipe.training, dense_gradients="bf16"))
    pool = ranks(2)
    exact, (first, second) = pool.run(weights_after, recipe)[0], pool.run(weights_after, rounded)
    for name, weight in first.items():
        assert torch.equal(weight, second[name])
        torch.testing.assert_close(weight, exact[name], rtol=0.1, atol=0.03)
    assert any(not torch.equal(weight, exact[name]) for name, weight in first.items())


@pytest.mark.parametrize(("name", "value"), [("dense_precision", "fp16"), ("dense_gradients", "auto")])
def test_unknown_precisions_are_refused(name, value):
    with pytest.raises(ValueError, match=f"training.{name} is '{value}'"):
        Training(**{name: value})
