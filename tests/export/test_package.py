import json
import os

import pytest
import torch
from torch import nn

import meshrec
from meshrec.export import PackageError, Predictor, compile_anew, export
from meshrec.export import package as package_module
from meshrec.export import predictor as predictor_module
from meshrec.export.archive import load_exported
from meshrec.export.package import compile_program, why_not_compiled
from meshrec.export.weights import Weights
from meshrec.models import DLRM
from meshrec.train.losses import SquaredError
from tests.export.conftest import FEATURES, NUM_DENSE, NUM_ROWS, SHARED, torchs_own_warnings


def scores_of(model, dense, values, lengths):
    sparse = meshrec.KeyedJaggedTensor(
        FEATURES, torch.cat([values[f] for f in FEATURES]), None, torch.cat([lengths[f] for f in FEATURES])
    )
    with torch.no_grad():
        return torch.sigmoid(model(dense, sparse).reshape(-1))


@pytest.fixture(params=["package", "uncompiled"])
def predictor(request):
    with torchs_own_warnings():
        return Predictor(request.getfixturevalue(request.param), verify=True)


def test_one_package_serves_all_batch_sizes(predictor, model, requests):
    for batch in (0, 1, 2, 7, 2048):
        dense, values, lengths = requests(batch)
        torch.testing.assert_close(
            predictor(dense, values, lengths), scores_of(model, dense, values, lengths), rtol=1e-5, atol=1e-6
        )


def test_weights_are_in_one_file_only(package, model):
    tables = sum(parameter.nbytes for parameter in model.parameters())
    sizes = {path.name: path.stat().st_size for path in package.iterdir()}
    assert sizes["weights.bin"] >= tables
    manifest = json.loads((package / "manifest.json").read_text())
    assert {record["name"] for record in manifest["weights"]} == dict(model.named_parameters()).keys()
    data = (package / "weights.bin").read_bytes()
    weight = model.sparse_arch.embedding_bag_collection.embedding_bags["t1"].weight.detach()
    start = weight.numpy().tobytes()[:64]
    assert data.count(start) == 1
    for name in ("program.pt2", "exported.pt2"):
        assert start not in (package / name).read_bytes()
    assert manifest["about"] == {"step": 7}


@pytest.mark.parametrize("name", ["items", "keys", "type", "forward"])
def test_a_table_may_be_called_like_a_method_of_modules(name, tmp_path):
    torch.manual_seed(0)
    table = meshrec.EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=9, feature_names=[name])
    model = DLRM(meshrec.EmbeddingBagCollection([table]), 1, [8], [4, 1])
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with torchs_own_warnings():
        export(model, tmp_path / "p", features=[name], num_dense=1, compile=False)
        predictor = Predictor(tmp_path / "p")
    dense, ids, lengths = torch.rand(3, 1), torch.tensor([1, 8, 4]), torch.tensor([2, 0, 1])
    found = predictor(dense, {name: ids}, {name: lengths})
    with torch.no_grad():
        logits = model(dense, meshrec.KeyedJaggedTensor([name], ids, lengths=lengths))
    torch.testing.assert_close(found, torch.sigmoid(logits.reshape(-1)))
    for each, value in model.state_dict().items():
        assert torch.equal(value, before[each])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d, v, n: (d[:, 1:], v, n), r"\[batch, 4\].*float32.*\[5, 3\]"),
        (lambda d, v, n: (d.double(), v, n), r"float32.*\[5, 4\].*torch.float64"),
        (
            lambda d, v, n: (d.index_fill(0, torch.tensor([3]), float("nan")), v, n),
            "value 0.*sample 3",
        ),
        (
            lambda d, v, n: (d.index_fill(1, torch.tensor([2]), float("-inf")), v, n),
            "value 2.*sample 0",
        ),
        (lambda d, v, n: (d, {**v, "x": v["f0"]}, n), r"\[\].*\['x'\]"),
        (lambda d, v, n: (d, v, {"f0": n["f0"]}), r"\['f 1', 'f2'\]"),
        (lambda d, v, n: (d, {**v, "f0": v["f0"].int()}, n), "'f0'.*int64"),
        (lambda d, v, n: (d, v, {**n, "f0": n["f0"][1:]}), "'f0'.*4 lengths.*5 samples"),
        (lambda d, v, n: (d, v, {**n, "f0": n["f0"] - 3}), "'f0'"),
        (
            lambda d, v, n: (d, {**v, "f0": v["f0"][1:]}, n),
            r"'f0': the lengths sum to \d+, but there are \d+ ids",
        ),
        (
            lambda d, v, n: (d, {**v, "f 1": torch.cat([v["f 1"][:-1], torch.tensor([50])])}, n),
            r"'t1'.*id 50.*'f 1'.*\[0.*50",
        ),
    ],
)
def test_bad_requests_are_named(predictor, requests, change, message):
    dense, values, lengths = requests(5)
    with pytest.raises(ValueError, match=message):
        predictor(*change(dense, values, lengths))


def copied(package, tmp_path):
    """With hard links: cheap, but files must be replaced, not written to."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in package.iterdir():
        os.link(path, folder / path.name)
    return folder


def replace(path, data):
    path.unlink()
    path.write_bytes(data)


def test_damage_is_named(package, tmp_path):
    with pytest.raises(PackageError, match="package"):
        Predictor(tmp_path)
    folder = copied(package, tmp_path)
    data = bytearray((folder / "weights.bin").read_bytes())
    data[100] ^= 1
    replace(folder / "weights.bin", data)
    with pytest.raises(PackageError, match=r"weights.bin"):
        Predictor(folder)
    replace(folder / "weights.bin", data[:4096])
    with pytest.raises(PackageError, match=r"weights.bin.*4,096 bytes"):
        Predictor(folder)
    with pytest.raises(PackageError, match="short"):
        Predictor(folder, verify=False)
    (folder / "weights.bin").unlink()
    with pytest.raises(PackageError, match=r"weights.bin"):
        Predictor(folder)
    replace(
        folder / "manifest.json",
        (folder / "manifest.json").read_bytes().replace(b'"format": 2', b'"format": 9'),
    )
    with pytest.raises(PackageError, match=r"format 9.*reads 2"):
        Predictor(folder)


@pytest.mark.parametrize(
    ("name", "reason"), [("torch", "is for torch"), ("isa", "is for"), ("operators", "operator versions")]
)
def test_a_program_for_something_else_is_not_run(package, tmp_path, caplog, requests, model, name, reason):
    folder = copied(package, tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest[name] = "other"
    replace(folder / "manifest.json", json.dumps(manifest).encode())
    with torchs_own_warnings():
        predictor = Predictor(folder, verify=False)
    assert not predictor.is_compiled
    assert reason in caplog.text
    torch.testing.assert_close(predictor(*requests(3)), scores_of(model, *requests(3)), rtol=1e-5, atol=1e-6)


def test_what_cannot_be_exported_is_named_and_leaves_nothing(model, tmp_path, monkeypatch):
    class OnData(nn.Module):
        def forward(self, dense, sparse):
            return dense.sum(1) if dense.sum() > 0 else dense[:, 0]

    with torchs_own_warnings(), pytest.raises(ValueError, match="OnData"):
        export(OnData(), tmp_path / "out", features=FEATURES, num_dense=NUM_DENSE)
    with torchs_own_warnings(), pytest.raises(ValueError, match=r"DLRM.*f2"):
        export(model, tmp_path / "out", features=FEATURES[:2], num_dense=NUM_DENSE)
    with pytest.raises(ValueError, match=r"torch.float64.*float32"):
        export(nn.Linear(2, 2).double(), tmp_path / "out", features=FEATURES, num_dense=NUM_DENSE)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="exists"):
        export(model, tmp_path, features=FEATURES, num_dense=NUM_DENSE)
    assert model.training


@pytest.mark.usefixtures("needs_compiled")
def test_without_a_compiler_python_serves(model, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with torchs_own_warnings():
        folder = export(model, tmp_path / "out", features=FEATURES, num_dense=NUM_DENSE)
    assert "no C++ compiler: 'no-such-compiler' is not installed" in caplog.text
    assert not (folder / "program.pt2").exists()


def test_scores_are_what_the_loss_says(model, tmp_path, requests):
    request = requests(5)
    with torchs_own_warnings():
        plain = Predictor(
            export(
                model,
                tmp_path / "values",
                features=FEATURES,
                num_dense=NUM_DENSE,
                scores=SquaredError().scores,
                compile=False,
            )
        )
        clicks = Predictor(
            export(model, tmp_path / "clicks", features=FEATURES, num_dense=NUM_DENSE, compile=False)
        )
    torch.testing.assert_close(torch.sigmoid(plain(*request)), clicks(*request))


def test_several_outputs_are_refused(model, tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, dense, sparse):
            return self.model(dense, sparse).repeat(1, 2)

    with pytest.raises(ValueError, match=r"returns .*2"):
        export(Two(), tmp_path / "out", features=FEATURES, num_dense=NUM_DENSE)
    assert not (tmp_path / "out").exists()


def test_quantised_tables_are_looked_up_as_in_their_model(small, small_package, requests):
    predictor = Predictor(small_package)
    assert predictor.is_compiled == (why_not_compiled() is None)
    assert sorted(predictor.quantised.values()) == ["INT2", "INT4", "INT8"]
    assert predictor.rounding == "minmax"
    for batch in (0, 1, 7):
        torch.testing.assert_close(
            predictor(*requests(batch)), scores_of(small, *requests(batch)), rtol=1e-5, atol=1e-6
        )
    name = next(iter(predictor.quantised))
    assert torch.equal(predictor.weights[name], small.get_parameter(name))


def grouped(requests, num_rows, batch):
    """A request of samples that share rows, and the same with these repeated."""
    dense, values, lengths = requests(num_rows)
    _, own_values, own_lengths = requests(batch)
    group = torch.arange(batch) * 7 % num_rows
    repeated = ({}, {})
    for feature in FEATURES:
        if feature in SHARED:
            bags = values[feature].split(lengths[feature].tolist())
            repeated[0][feature] = torch.cat([values[feature][:0], *(bags[row] for row in group)])
            repeated[1][feature] = lengths[feature][group]
        else:
            repeated[0][feature], repeated[1][feature] = own_values[feature], own_lengths[feature]
            values[feature], lengths[feature] = own_values[feature], own_lengths[feature]
    return (dense, values, lengths, group), (dense[group], *repeated)


@pytest.mark.parametrize(("num_rows", "batch"), [(1, 1), (1, 50), (3, 7), (2, 0)])
def test_shared_features_give_what_repeating_them_gives(small_package, requests, num_rows, batch):
    predictor = Predictor(small_package)
    (*shared, group), repeated = grouped(requests, num_rows, batch)
    torch.testing.assert_close(predictor(*shared, group=group), predictor(*repeated), rtol=1e-6, atol=1e-7)


class Histories(nn.Module):
    """Its tables give a vector for each id."""

    def __init__(self):
        super().__init__()
        tables = [
            meshrec.EmbeddingConfig(
                name=f"t{i}", embedding_dim=8, num_embeddings=NUM_ROWS, feature_names=[feature]
            )
            for i, feature in enumerate(FEATURES)
        ]
        self.tables = meshrec.EmbeddingCollection(tables)
        self.over = nn.Linear(NUM_DENSE + 8 * len(FEATURES), 1)

    def forward(self, dense, sparse):
        vectors = self.tables(sparse)
        sums = [vectors[feature].to_padded_dense(4).sum(1) for feature in FEATURES]
        return self.over(torch.cat([dense, *sums], dim=1))


def test_histories_are_shared_too(requests, tmp_path):
    with torchs_own_warnings():
        package = export(
            Histories(), tmp_path / "p", features=FEATURES, num_dense=NUM_DENSE, shared=SHARED, compile=False
        )
        predictor = Predictor(package)
    for num_rows, batch in ((1, 1), (3, 7), (2, 0)):
        (*shared, group), repeated = grouped(requests, num_rows, batch)
        torch.testing.assert_close(predictor(*shared, group=group), predictor(*repeated))


def test_layers_over_what_is_shared_run_once_a_row(small_package):
    graph = load_exported(small_package / "shared-exported.pt2").graph
    (late,) = [
        node
        for node in graph.nodes
        if node.target is torch.ops.aten.index_select.default
        and node.args[0].target is torch.ops.aten.relu.default
    ]
    assert late.args[2].name == "group"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d, v, n, g: (d, v, n, g.int()), r"\[batch\].*int64.*\[7\].*torch.int32"),
        (lambda d, v, n, g: (d, v, n, g + 1), "group.*1.*3.*3"),
        (lambda d, v, n, g: (d, v, {**n, "f 1": n["f 1"][:3]}, g), "'f 1'.*3 lengths.*7 samples"),
        (lambda d, v, n, g: (d, v, {**n, "f0": n["f0"][:2]}, g), "'f0'.*2 lengths.*3 samples"),
    ],
)
def test_bad_groups_are_named(small_package, requests, change, message):
    request, _ = grouped(requests, 3, 7)
    *request, group = change(*request)
    with pytest.raises(ValueError, match=message):
        Predictor(small_package)(*request, group=group)


def test_what_cannot_be_shared_is_named(model, uncompiled, requests, tmp_path):
    for shared in (["x"], [*FEATURES, "dense"]):
        with pytest.raises(ValueError, match="shared"):
            export(model, tmp_path / "p", features=FEATURES, num_dense=NUM_DENSE, shared=shared)
    with torchs_own_warnings(), pytest.raises(ValueError, match="features"):
        Predictor(uncompiled)(*requests(2), group=torch.zeros(2, dtype=torch.int64))


def test_a_package_is_compiled_anew(uncompiled, package, requests, tmp_path):
    made, exported = Predictor(package, verify=True), Predictor(uncompiled)
    assert made.is_compiled
    assert not exported.is_compiled
    assert made.about == exported.about
    assert os.path.samefile(uncompiled / "weights.bin", package / "weights.bin")
    for batch in (0, 1, 9):
        torch.testing.assert_close(made(*requests(batch)), exported(*requests(batch)), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="exists"):
        compile_anew(uncompiled, package)
    with pytest.raises(PackageError, match="package"):
        compile_anew(tmp_path, tmp_path / "other")


def test_a_program_of_operators_that_are_not_there_is_named(uncompiled, tmp_path):
    folder = copied(uncompiled, tmp_path)
    replace(folder / "exported.pt2", b"no program")
    with torchs_own_warnings(), pytest.raises(PackageError, match=r"exported.pt2"):
        Predictor(folder, verify=False)


def test_packages_that_change_places_meanwhile_are_never_mixed(uncompiled, tmp_path, monkeypatch):
    first, second, place = uncompiled, copied(uncompiled, tmp_path), tmp_path / "current"
    manifest = (second / "manifest.json").read_bytes()
    replace(second / "manifest.json", manifest.replace(b'"step": 7', b'"step": 8'))

    def read_while(change):
        def late(*given, **how):
            change()
            return Weights(*given, **how)

        with monkeypatch.context() as patch:
            patch.setattr(predictor_module, "Weights", late)
            return Predictor(place, verify=False)

    def turn():
        place.unlink()
        place.symlink_to(second)

    place.symlink_to(first)
    found = read_while(turn)
    assert (found.folder, found.about) == (first, {"step": 7})

    def move():
        place.rename(tmp_path / "old")
        second.rename(place)

    place.unlink()
    place.mkdir()
    for path in first.iterdir():
        os.link(path, place / path.name)
    with pytest.raises(PackageError, match="was replaced"):
        read_while(move)
    assert Predictor(place, verify=False).about == {"step": 8}


def test_torch_that_compiles_wrongly_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "__version__", "2.10.0+cpu")
    why_not = compile_program(None, tmp_path / "program.pt2")
    assert "2.10.0+cpu" in why_not
    assert not list(tmp_path.iterdir())


def test_a_package_is_compiled_only_if_all_programs_are(model, tmp_path, monkeypatch, caplog):
    outcomes = iter(["no compiler", None])
    monkeypatch.setattr(package_module, "compile_program", lambda *_: next(outcomes))
    with torchs_own_warnings():
        folder = export(model, tmp_path / "p", features=FEATURES, num_dense=NUM_DENSE, shared=SHARED)
        assert not Predictor(folder).is_compiled
    assert json.loads((folder / "manifest.json").read_text())["compiled"] is False
    assert "no compiler" in caplog.text
