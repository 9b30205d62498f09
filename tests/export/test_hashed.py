"""Packages of models with hashed tables: the bits of the trainer's own evaluation, whatever the IDs."""

import json
import os
import shutil

import pytest
import torch
from torch import nn

import meshrec
from meshrec.export import PackageError, Predictor, compile_anew, export
from meshrec.export.package import write_manifest_and_signature
from tests.export import hashed_models as made
from tests.export.conftest import torchs_own_warnings
from tests.export.test_runtime import call, program  # noqa: F401
from tests.export.test_runtime import pytestmark as needs_cmake

OPTIONS = {"features": made.FEATURES, "num_dense": made.NUM_DENSE, "scores": None}


def exported(model, folder, **options):
    with torchs_own_warnings():
        return export(model, folder, **{**OPTIONS, "compile": False, **options})


@pytest.fixture(scope="module")
def lookups():
    """A trained model, and the IDs that it has seen."""
    model = made.drawn_model(3, max_rows=40, evict=made.LRU(), admit=None)
    return model, made.trained(model, 3)


@pytest.fixture(scope="module")
def uncompiled(lookups, tmp_path_factory):
    return exported(lookups[0], tmp_path_factory.mktemp("hashed") / "package")


@pytest.fixture
def folder(uncompiled, tmp_path):
    return shutil.copytree(uncompiled, tmp_path / "package")


@pytest.fixture(scope="module")
def compiled(uncompiled, made_once, needs_compiled):
    """Compiled anew from a package that has no compiled program."""

    def make(folder):
        with torchs_own_warnings():
            compile_anew(uncompiled, folder)

    return made_once("hashed", make)


@pytest.mark.parametrize("seed", range(6 if "MESHREC_THOROUGH" in os.environ else 2))
def test_packages_give_the_bits_of_evaluation(seed, tmp_path):
    model = made.drawn_model(seed)
    seen = made.trained(model, seed)
    model.eval()
    before = made.contents(model)
    predictor = Predictor(exported(model, tmp_path / "package"))
    for number, size in enumerate((0, 1, 20, 200)):
        batch = made.drawn_batch(number, made.drawn_ids(number, seen), batch=size)
        assert torch.equal(predictor(*batch), made.evaluated(model, *batch))
    assert made.same(made.contents(model), before)


def test_evicted_ids_read_their_first_rows(lookups, compiled):
    model, seen = lookups
    table = model.bags.hashed_tables()["h0"]
    gone = seen[~torch.isin(seen, table.items()[0])]
    assert table.report.evicted > 0
    assert len(gone) > 20
    batch = made.drawn_batch(1, gone)
    assert torch.equal(Predictor(compiled)(*batch), made.evaluated(model, *batch))


def test_a_package_compiled_anew_gives_the_bits_of_evaluation(lookups, compiled):
    model, seen = lookups
    predictor = Predictor(compiled)
    assert predictor.is_compiled
    for number, size in enumerate((0, 1, 2, 300)):
        batch = made.drawn_batch(number, made.drawn_ids(number, seen), batch=size)
        assert torch.equal(predictor(*batch), made.evaluated(model, *batch))


@needs_cmake
def test_cpp_gives_the_bits_of_python(program, lookups, compiled):  # noqa: F811
    model, seen = lookups
    dense, values, lengths = batch = made.drawn_batch(5, made.drawn_ids(5, seen), batch=50)
    ends = {f: [0, *own.cumsum(0).tolist()] for f, own in lengths.items()}
    lines = [
        " | ".join(
            [" ".join(map(repr, row.tolist()))]
            + [
                " ".join(map(str, values[f][ends[f][sample] : ends[f][sample + 1]].tolist()))
                for f in made.FEATURES
            ]
        )
        for sample, row in enumerate(dense)
    ]
    done = call(program, compiled, input="\n".join(lines) + "\n", check=True)
    found = torch.tensor([float(line) for line in done.stdout.split()])
    assert torch.equal(found, made.evaluated(model, *batch).flatten())


def test_features_of_a_user_are_shared(lookups, tmp_path):
    model, seen = lookups
    torch.manual_seed(0)
    model = made.with_scores(model)
    options = {"scores": torch.sigmoid, "shared": ["bag", "more", "sequence"]}
    predictor = Predictor(exported(model, tmp_path / "shared", **options))
    ids = made.drawn_ids(7, seen)
    dense, values, lengths = made.drawn_batch(7, ids, batch=40)
    _, user_values, user_lengths = made.drawn_batch(8, ids, batch=2)
    group = torch.arange(40) % 2
    for feature in predictor.shared:
        values[feature], lengths[feature] = user_values[feature], user_lengths[feature]
    found = predictor(dense, values, lengths, group=group)
    for feature in predictor.shared:
        rows = values[feature].split(lengths[feature].tolist())
        values[feature] = torch.cat([rows[row] for row in group.tolist()])
        lengths[feature] = lengths[feature][group]
    torch.testing.assert_close(found, predictor(dense, values, lengths), rtol=1e-5, atol=1e-6)


def test_torchscript_holds_the_rows(lookups, run_in_cpp, tmp_path):
    model, seen = lookups
    folder = exported(model, tmp_path / "script", torchscript=True)
    dense, values, lengths = made.drawn_batch(9, made.drawn_ids(9, seen))
    inputs = [dense, *(each[f] for each in (values, lengths) for f in made.FEATURES)]
    found = run_in_cpp(folder / "torchscript.pt", inputs)
    assert torch.equal(found.flatten(), made.evaluated(model, dense, values, lengths).flatten())


def test_tables_without_rows_are_served(tmp_path):
    model = made.drawn_model(0).eval()
    predictor = Predictor(exported(model, tmp_path / "empty"))
    batch = made.drawn_batch(0, made.EDGES)
    assert torch.equal(predictor(*batch), made.evaluated(model, *batch))


def test_an_init_fn_cannot_be_exported(tmp_path):
    config = meshrec.EmbeddingBagConfig(
        name="h",
        embedding_dim=4,
        feature_names=["bag"],
        keys=meshrec.Hashed(max_rows=10),
        init_fn=nn.init.ones_,
    )
    model = made.Lookups(meshrec.EmbeddingBagCollection([config]), None)
    with pytest.raises(ValueError, match=r"'h'.*init_fn"):
        exported(model, tmp_path / "package")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda said: said.update(dim="4"), "dim"),
        (lambda said: said.update(low=None), "low"),
        (lambda said: said.update(high=float("inf")), "high"),
        (lambda said: said.update(seed=-1), "seed"),
        (lambda said: said.pop("first_seed"), "lacks"),
        (lambda said: said.update(more=1), "unknown"),
    ],
)
def test_formulas_that_cannot_be_true_are_refused(folder, change, words):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest["hashed"]["bags.embedding_bags.h0.weight"])
    path.write_text(json.dumps(manifest))
    with pytest.raises(PackageError, match=words):
        Predictor(folder, verify=False)


def test_keys_in_the_form_of_an_earlier_release_are_refused(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace("h0.buckets", "h0.starts"))
    with pytest.raises(PackageError, match=r"h0\.weight"):
        Predictor(folder, verify=False)


def test_the_formulas_belong_to_the_program(folder):
    """With layout and digests made anew, too."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["hashed"]["bags.embedding_bags.h0.weight"]["first_seed"] += 1
    for name in ("manifest.json", "digests.txt", "layout.txt"):
        (folder / name).unlink()
    write_manifest_and_signature(folder, {name: said for name, said in manifest.items() if name != "sha256"})
    with pytest.raises(PackageError, match=r"exported\.pt2"):
        Predictor(folder)
