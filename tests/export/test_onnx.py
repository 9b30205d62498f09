"""ONNX files against the model, in onnxruntime, on random inputs."""

import warnings

import pytest
import torch

import meshrec
from meshrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from meshrec.cli.export import main as export_command
from meshrec.export.onnx import export_onnx
from meshrec.models import DLRM, DeepFMModel, HistoryFeatures, SampledSoftmax, SASRec, TwoTower
from meshrec.modules import DataType, PoolingType
from meshrec.train import RunFolder
from tests.test_estimators import clicks

pytest.importorskip("onnxscript")
ort = pytest.importorskip("onnxruntime")

FEATURES, NUM_DENSE = ["a", "b", "c"], 3
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def collection(**more):
    shapes = {"one": (50, ["a", "b"], PoolingType.SUM), "two": (7, ["c"], PoolingType.MEAN)}
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=8, feature_names=keys, pooling=mode, **more
            )
            for name, (rows, keys, mode) in shapes.items()
        ]
    )


class Query(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.towers = TwoTower(collection(), ["a", "b"], ["c"], [8, 4], dense_in_features=NUM_DENSE)

    def forward(self, dense, sparse):
        return self.towers(dense, sparse).query_BV


MODELS = {
    "dlrm": lambda: DLRM(collection(), NUM_DENSE, [16, 8], [16, 1]),
    "deepfm": lambda: DeepFMModel(collection(), NUM_DENSE, [8], [16, 1]),
    "vectors": Query,
}


def draw(num, seed):
    draw = torch.Generator().manual_seed(seed)
    lengths = [torch.randint(0, 4, (num,), generator=draw) for _ in FEATURES]
    rows = (50, 50, 7)
    values = [
        torch.randint(most, (int(each.sum()),), generator=draw)
        for most, each in zip(rows, lengths, strict=True)
    ]
    return torch.randn(num, NUM_DENSE, generator=draw), values, lengths


def run(path, dense, values, lengths):
    session = ort.InferenceSession(str(path))
    given = {"dense": dense}
    given |= {f"{name}.values": each for name, each in zip(FEATURES, values, strict=True)}
    given |= {f"{name}.lengths": each for name, each in zip(FEATURES, lengths, strict=True)}
    return torch.from_numpy(session.run(None, {name: each.numpy() for name, each in given.items()})[0])


class FirstColumn(torch.nn.Module):
    """The logit is the first dense column, as all rows are 0."""

    def __init__(self):
        super().__init__()
        self.bags = collection()
        for weight in self.bags.parameters():
            torch.nn.init.zeros_(weight)

    def forward(self, dense, sparse):
        return dense[:, 0] + self.bags(sparse).values().sum(1)


def test_scores_of_rare_clicks_are_those_of_the_model(tmp_path):
    export_onnx(FirstColumn(), tmp_path / "model.onnx", features=FEATURES, num_dense=NUM_DENSE)
    logits = torch.linspace(-80, 80, 321)
    _, values, lengths = draw(321, 0)
    dense = logits[:, None].repeat(1, NUM_DENSE)
    scores = run(tmp_path / "model.onnx", dense, values, lengths)
    torch.testing.assert_close(scores, logits.sigmoid(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", MODELS)
def test_a_file_gives_the_scores_of_the_model(kind, tmp_path):
    torch.manual_seed(0)
    model, path = MODELS[kind]().eval(), tmp_path / "model.onnx"
    scores = None if kind == "vectors" else torch.sigmoid
    export_onnx(model, path, features=FEATURES, num_dense=NUM_DENSE, scores=scores)
    for num in (1, 5, 64):
        dense, values, lengths = draw(num, num)
        sparse = KeyedJaggedTensor(FEATURES, torch.cat(values), lengths=torch.cat(lengths))
        with torch.no_grad():
            expected = model(dense, sparse)
        expected = expected if scores is None else scores(expected.reshape(-1))
        torch.testing.assert_close(run(path, dense, values, lengths), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.InvalidArgument):
        run(path, dense, [values[0] + 50, *values[1:]], lengths)


def test_what_onnx_cannot_hold_is_refused(tmp_path):
    def export(model, path="model.onnx"):
        return export_onnx(model, tmp_path / path, features=FEATURES, num_dense=NUM_DENSE)

    table = EmbeddingConfig(name="items", num_embeddings=9, embedding_dim=8, feature_names=["a", "b"])
    softmax = SampledSoftmax()
    histories = SASRec(EmbeddingCollection([table]), HistoryFeatures("a", "b"), max_length=5, softmax=softmax)
    with pytest.raises(ValueError, match="EmbeddingCollection"):
        export(histories)
    with pytest.raises(ValueError, match=r"'one'.*FP16"):
        export(DLRM(collection(data_type=DataType.FP16), NUM_DENSE, [16, 8], [16, 1]))
    with pytest.raises(ValueError, match=r"model\.bin.*\.onnx"):
        export(MODELS["dlrm"](), "model.bin")
    (tmp_path / "model.onnx").touch()
    with pytest.raises(ValueError, match="exists"):
        export(MODELS["dlrm"]())


def test_the_command_writes_the_scores_of_a_run(tmp_path, capsys):
    data = clicks()
    options = {"training.max_steps": 3, "training.epochs": 1}
    model = meshrec.Classifier(label="clicked", options=options).fit(data)
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert export_command([str(model.run_), "--out", str(path), "--format", "onnx"]) == 0
    from meshrec.runs.export import export_run

    package = meshrec.export.Predictor(export_run(RunFolder(model.run_), tmp_path / "p", compile=False))
    table = data.select(list(package.raw.columns)).slice(0, 20)
    encoded = package.raw.encode(table)
    session = ort.InferenceSession(str(path))
    given = {f"{name}.values": ids for name, ids in encoded.values.items()}
    given |= {f"{name}.lengths": lengths for name, lengths in encoded.lengths.items()}
    wanted = {each.name for each in session.get_inputs()}
    (scores,) = session.run(
        None, {k: v for k, v in ({"dense": encoded.dense} | given).items() if k in wanted}
    )
    expected = model.predict_proba(data.drop_columns(["clicked"]).slice(0, 20))[:, 1]
    assert scores == pytest.approx(expected, rel=1e-5, abs=1e-6)
    with pytest.raises(ValueError, match=r"--triton.*onnx"):
        export_command([str(model.run_), "--out", str(path), "--format", "onnx", "--triton", str(tmp_path)])
