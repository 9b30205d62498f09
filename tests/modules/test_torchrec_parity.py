"""Dense modules and feature processors against TorchRec's: the same seed gives the same numbers and names."""

import importlib
import warnings

import pytest
import torch

import meshrec
import meshrec.modules as ours

pytestmark = pytest.mark.peers


@pytest.fixture(autouse=True, scope="module")
def torchrec():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torchrec", reason="`make parity` installs it")


def theirs(path):
    return importlib.import_module(f"torchrec.modules.{path}")


def run(make, inputs, *, seed=0):
    torch.manual_seed(seed)
    module = make()
    out = module(inputs)
    out = out.to_dict() if hasattr(out, "to_dict") else out
    values = list(out.values()) if isinstance(out, dict) else [out]
    torch.stack([value.square().sum() for value in values]).sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return values, dict(module.state_dict()), gradients


@pytest.mark.parametrize(
    ("path", "name", "arguments"),
    [
        ("mlp", "MLP", {"in_size": 6, "layer_sizes": [5, 3]}),
        ("mlp", "MLP", {"in_size": 6, "layer_sizes": [5, 3], "activation": "sigmoid", "bias": False}),
        ("mlp", "MLP", {"in_size": 6, "layer_sizes": [5, 3], "activation": "swish_layernorm"}),
        ("mlp", "MLP", {"in_size": 6, "layer_sizes": [5, 3], "activation_on_last": False}),
        ("mlp", "MLP", {"in_size": 6, "layer_sizes": [5, 3], "activation": torch.nn.PReLU}),
        ("mlp", "Perceptron", {"in_size": 6, "out_size": 3}),
        ("activation", "SwishLayerNorm", {"input_dims": 6}),
        ("crossnet", "CrossNet", {"in_features": 6, "num_layers": 3}),
        ("crossnet", "LowRankCrossNet", {"in_features": 6, "num_layers": 3, "low_rank": 2}),
        ("crossnet", "VectorCrossNet", {"in_features": 6, "num_layers": 3}),
        ("crossnet", "LowRankMixtureCrossNet", {"in_features": 6, "num_layers": 3, "low_rank": 2}),
        (
            "crossnet",
            "LowRankMixtureCrossNet",
            {"in_features": 6, "num_layers": 2, "low_rank": 2, "num_experts": 3, "activation": torch.tanh},
        ),
    ],
)
def test_dense_modules(path, name, arguments):
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    room = theirs(path)
    mine, their = (run(lambda room=room: getattr(room, name)(**arguments), inputs) for room in (ours, room))
    torch.testing.assert_close(mine, their)


def test_halves_of_deepfm():
    room = theirs("deepfm")
    inputs = [torch.randn(3, 2, 4), torch.randn(3, 5)]
    torch.testing.assert_close(ours.FactorizationMachine()(inputs), room.FactorizationMachine()(inputs))
    mine, their = (run(lambda r=r: r.DeepFM(torch.nn.Linear(13, 2)), inputs) for r in (ours, room))
    torch.testing.assert_close(mine, their)


def kjt(library):
    return library.KeyedJaggedTensor.from_lengths_sync(
        ["f", "g", "h"], torch.tensor([3, 1, 2, 0, 1, 1, 2]), torch.tensor([2, 0, 1, 3, 0, 1])
    )


def test_position_weights(torchrec):
    room = theirs("feature_processor_")
    mine, their = (r.PositionWeightedModuleCollection({"g": 3, "f": 2}) for r in (ours, room))
    for module in (mine, their):
        for parameter in module.parameters():
            torch.nn.init.uniform_(parameter, generator=torch.Generator().manual_seed(1))
    assert list(mine.state_dict()) == list(their.state_dict())
    torch.testing.assert_close(mine(kjt(meshrec)).weights(), their(kjt(torchrec)).weights())
    single, their_single = (r.PositionWeightedModule(3) for r in (ours, room))
    torch.testing.assert_close(single.state_dict(), their_single.state_dict())
    torch.testing.assert_close(
        single(kjt(meshrec)["g"]).weights(), their_single(kjt(torchrec)["g"]).weights()
    )


def test_processed_collections(torchrec):
    fp, processed = theirs("feature_processor_"), theirs("fp_embedding_modules")

    def make(library, processors, collection):
        tables = [
            library.EmbeddingBagConfig(
                name=name,
                num_embeddings=4,
                embedding_dim=2,
                feature_names=[feature],
                init_fn=lambda weight: torch.nn.init.uniform_(
                    weight, generator=torch.Generator().manual_seed(2)
                ),
            )
            for name, feature in (("t", "f"), ("u", "g"))
        ]
        ebc = library.EmbeddingBagCollection(tables=tables, is_weighted=True)
        each = {"f": processors.PositionWeightedModule(2), "g": processors.PositionWeightedModule(3)}
        return collection.FeatureProcessedEmbeddingBagCollection(ebc, each)

    mine, their = make(meshrec, ours, ours), make(torchrec, fp, processed)
    assert sorted(mine.state_dict()) == sorted(their.state_dict())
    mine, their = mine(kjt(meshrec)), their(kjt(torchrec))
    assert mine.keys() == their.keys()
    torch.testing.assert_close(mine.to_dict(), their.to_dict())


def test_regrouping(torchrec):
    values = torch.randn(4, 6)
    results = []
    for library, room in ((meshrec, ours), (torchrec, theirs("regroup"))):
        tensor = library.KeyedTensor(["a", "b", "c"], [1, 2, 3], values)
        results.append(room.KTRegroupAsDict([["c", "a"], ["b"]], ["x", "y"])([tensor]))
    torch.testing.assert_close(*results)
