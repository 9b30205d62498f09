import pytest
import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from meshrec.compat.bridge import dlrm as bridged
from meshrec.compat.bridge import embeddings
from meshrec.compat.bridge.deepfm import SimpleDeepFMNN, SimpleDeepFMNNWrapper
from meshrec.compat.bridge.dlrm import DLRM_DCN
from meshrec.compat.bridge.fx import symbolic_trace
from meshrec.compat.bridge.sparse import KeyedJaggedTensor as Bridged
from meshrec.models import dlrm

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
    pytest.mark.filterwarnings("ignore:The TorchScript type system:UserWarning"),  # torch's own GraphModule
]


def test_it_is_meshrecs_model():
    torch.manual_seed(0)
    ebc = EmbeddingBagCollection(
        [EmbeddingBagConfig(name="t", num_embeddings=5, embedding_dim=4, feature_names=["f"])]
    )
    model = DLRM_DCN(ebc, 3, [6, 4], [5, 1], dcn_num_layers=2, dcn_low_rank_dim=3)
    assert isinstance(model, dlrm.DLRM)
    other = dlrm.DLRM_DCN(ebc, 3, [6, 4], [5, 1], 2, 3)
    other.load_state_dict(model.state_dict())
    dense = torch.randn(2, 3)
    sparse = KeyedJaggedTensor(["f"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))
    assert torch.equal(model(dense, sparse), other(dense, sparse))


def collection():
    tables = [("t", ["x", "y"]), ("u", ["z"])]
    return embeddings.EmbeddingBagCollection(
        [embeddings.EmbeddingBagConfig(8, 4, name, feature_names=names) for name, names in tables]
    )


def inputs():
    return torch.rand(2, 3), Bridged(
        ["z", "y", "x"], torch.arange(5), lengths=torch.tensor([1, 0, 2, 1, 0, 1])
    )


MODELS = {
    "dlrm": lambda: bridged.DLRM(collection(), 3, [6, 4], [5, 1]),
    "dcn": lambda: bridged.DLRM_DCN(collection(), 3, [6, 4], [5, 1], 2, 3),
    "projection": lambda: bridged.DLRM_Projection(collection(), 3, [6, 4], [5, 1], [8], [12]),
    "deepfm": lambda: SimpleDeepFMNN(3, collection(), hidden_layer_size=6, deep_fm_dimension=2),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_in_graphs_and_script_are_those_of_python(name):
    model = MODELS[name]()
    expected = model(*inputs())
    graph = symbolic_trace(model)
    torch.manual_seed(0)
    dense, sparse = inputs()
    expected = model(dense, sparse)
    for each in (graph, torch.jit.script(graph)):
        torch.testing.assert_close(each(dense, sparse), expected)


def test_a_dlrm_is_scripted_as_it_is():
    model, batch = MODELS["dlrm"](), inputs()
    torch.testing.assert_close(torch.jit.script(model)(*batch), model(*batch))
    assert model.sparse_arch.sparse_feature_names == ["x", "y", "z"]


def test_projections_are_multiplied():
    arch = bridged.InteractionProjectionArch(1, torch.nn.Identity(), torch.nn.Identity())
    dense, sparse = torch.tensor([[1.0, 2.0]]), torch.tensor([[[3.0, 4.0]]])
    # [[1, 2], [3, 4]] times itself
    assert arch(dense, sparse).tolist() == [[1, 2, 7, 10, 15, 22]]
    with pytest.raises(ValueError, match=r"embedding_dim.*4.*\[7\]"):
        bridged.DLRM_Projection(collection(), 3, [6, 4], [5, 1], [8], [7])


@pytest.mark.parametrize(
    "make",
    [
        lambda tables: bridged.DLRM(tables, 3, [6, 4], [5, 1]),
        lambda tables: bridged.DLRM_DCN(tables, 3, [6, 4], [5, 1], 2, 3),
        lambda tables: SimpleDeepFMNN(3, tables, 6, 2),
    ],
)
def test_models_need_tables_of_one_width(make):
    with pytest.raises(AssertionError, match="collection"):
        make(embeddings.EmbeddingBagCollection([]))
    tables = [embeddings.EmbeddingBagConfig(4, width, f"t{width}") for width in (4, 8)]
    with pytest.raises(AssertionError, match=r"embedding_dim.*\[4, 8\]"):
        make(embeddings.EmbeddingBagCollection(tables))


@pytest.mark.parametrize(
    "make",
    [
        lambda: bridged.DLRMWrapper(collection(), 3, [6, 4], [5, 1]),
        lambda: SimpleDeepFMNNWrapper(3, collection(), 6, 2),
    ],
)
def test_wrappers_take_whole_batches(make):
    model = make()
    batch = bridged.ModelInput(*inputs(), None, torch.tensor([0.0, 1.0]))
    loss, logits = model(batch)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits.squeeze(1), batch.label)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model.eval()(batch), logits)


def test_sets_among_n():
    assert [bridged.choose(4, k) for k in (-1, 0, 2, 4, 5)] == [0, 1, 6, 1, 0]


# Importing Inductor defines scripted modules of torch.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_only_the_dense_layers_are_compiled():
    model = MODELS["dlrm"]()
    torch.manual_seed(0)
    dense, sparse = inputs()
    expected = model(dense, sparse)
    model.compile_dense_path("default")
    compiled = [model.dense_arch, model.inter_arch, model.over_arch]
    assert all(isinstance(layer, torch._dynamo.OptimizedModule) for layer in compiled)
    model.compile_dense_path()
    assert [model.dense_arch, model.inter_arch, model.over_arch] == compiled
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(model(dense, sparse), expected)
