import pytest
import torch

import meshrec
from meshrec.compat.bridge import embeddings
from meshrec.compat.bridge.fx import symbolic_trace
from meshrec.compat.bridge.sparse import KeyedJaggedTensor
from meshrec.modules import DataType, PoolingType

# torch warns of the end of TorchScript; TorchRec's programs use it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
    pytest.mark.filterwarnings("ignore:The TorchScript type system:UserWarning"),  # torch's own GraphModule
]


def config(**given):
    return embeddings.EmbeddingBagConfig(
        **{"num_embeddings": 6, "embedding_dim": 3, "name": "t", "feature_names": ["f"], **given}
    )


def test_configs_have_their_arguments_in_the_other_order():
    found = embeddings.EmbeddingBagConfig(6, 3, "t", DataType.FP16, ["f"], pooling=PoolingType.MEAN)
    assert found == meshrec.EmbeddingBagConfig(
        num_embeddings=6,
        embedding_dim=3,
        name="t",
        feature_names=["f"],
        data_type=DataType.FP16,
        pooling=PoolingType.MEAN,
    )
    assert embeddings.EmbeddingConfig(6, 3, "t").feature_names == ["t"]
    assert config(need_pos=False, use_virtual_table=False).name == "t"


def test_what_configs_cannot_say():
    with pytest.raises(ValueError, match=r"'t'.*MeshRec.*need_pos"):
        config(need_pos=True)
    with pytest.raises(TypeError, match="'colour'"):
        config(colour="red")


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_collections_start_as_torchs_tables_do_and_are_drawn_again(device):
    torch.manual_seed(0)
    found = embeddings.EmbeddingBagCollection(tables=[config(), config(name="u")], device=device)
    torch.manual_seed(0)
    for _ in range(2):
        torch.empty(6, 3).normal_()
    expected = [torch.empty(6, 3).uniform_(-(6**-0.5), 6**-0.5) for _ in range(2)]
    for bag, weight in zip(found.embedding_bags.values(), expected, strict=True):
        assert torch.equal(bag.weight, weight)


def test_sequences_are_drawn_table_by_table():
    tables = [embeddings.EmbeddingConfig(4, 2, name) for name in ("t", "u")]
    torch.manual_seed(0)
    found = embeddings.EmbeddingCollection(tables)
    torch.manual_seed(0)
    for table in found.embeddings.values():
        torch.empty(4, 2).normal_()
        assert torch.equal(table.weight, torch.empty(4, 2).uniform_(-0.5, 0.5))
    assert found.device.type == "cpu"


def test_meta_draws_nothing():
    state = torch.get_rng_state()
    assert embeddings.EmbeddingBagCollection([config()], device="meta").device.type == "meta"
    tables = [embeddings.EmbeddingConfig(4, 2, "t")]
    assert embeddings.EmbeddingCollection(tables, device=torch.device("meta")).device.type == "meta"
    assert torch.equal(torch.get_rng_state(), state)


def test_ids_are_returned_as_weights():
    collection = embeddings.EmbeddingCollection([embeddings.EmbeddingConfig(4, 2, "t")], need_indices=True)
    bags = collection(KeyedJaggedTensor(["t"], torch.tensor([3, 1]), lengths=torch.tensor([2])))["t"]
    assert bags.weights().tolist() == [3, 1]
    assert collection.need_indices()
    assert collection.embedding_dim() == 2
    assert collection.embedding_names_by_table() == [["t"]]


@pytest.mark.parametrize("is_weighted", [False, True])
def test_bags_in_script_and_graph_are_those_of_the_kernel(is_weighted):
    tables = [config(name="a", feature_names=["x", "y"]), config(name="b", feature_names=["y"])]
    collection = embeddings.EmbeddingBagCollection(tables, is_weighted)
    features = KeyedJaggedTensor(
        ["y", "x"], torch.tensor([0, 1, 2, 3]), torch.rand(4), lengths=torch.tensor([1, 0, 2, 1])
    )
    expected = collection(features)
    graph = symbolic_trace(collection)
    for module in (torch.jit.script(collection), graph, torch.jit.script(graph)):
        found = module(features)
        assert found.keys() == expected.keys() == ["x", "y@a", "y@b"]
        torch.testing.assert_close(found.values(), expected.values())


def test_rows_in_script_and_graph_are_those_of_the_kernel():
    tables = [embeddings.EmbeddingConfig(4, 2, "t", feature_names=["x", "y"])]
    collection = embeddings.EmbeddingCollection(tables, need_indices=True)
    features = KeyedJaggedTensor(["x", "y"], torch.tensor([0, 1, 2]), lengths=torch.tensor([1, 2]))
    expected = collection(features)
    graph = symbolic_trace(collection)
    for module in (torch.jit.script(collection), graph, torch.jit.script(graph)):
        found = module(features)
        for key, bags in expected.items():
            torch.testing.assert_close(found[key].values(), bags.values())
            assert torch.equal(found[key].weights(), bags.weights())


def test_there_may_be_no_tables():
    assert embeddings.EmbeddingBagCollection([]).embedding_bag_configs() == []
    assert embeddings.EmbeddingCollection([]).embedding_dim() == -1


def test_types_and_words():
    assert embeddings.data_type_to_dtype(DataType.BF16) == torch.bfloat16
    assert embeddings.dtype_to_data_type(torch.float16) is DataType.FP16
    assert embeddings.pooling_type_to_str(PoolingType.MEAN) == "mean"
    with pytest.raises(ValueError, match=r"torch\.int8"):
        embeddings.dtype_to_data_type(torch.int8)
    with pytest.raises(ValueError, match="pool"):
        embeddings.pooling_type_to_str(PoolingType.NONE)


@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
def test_results_are_in_float32_whatever_the_tables_type(data_type):
    kjt = KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([2]))
    bags = embeddings.EmbeddingBagCollection([config(data_type=data_type)])
    pooled = bags(kjt).values()
    assert pooled.dtype is torch.float32
    pooled.sum().backward()
    assert bags.embedding_bags["t"].weight.grad.dtype is data_type.dtype
    rows = embeddings.EmbeddingCollection([embeddings.EmbeddingConfig(6, 3, "t", data_type, ["f"])])(kjt)
    assert rows["f"].values().dtype is torch.float32


def test_a_batch_without_samples_has_no_rows():
    nothing = torch.empty(0, dtype=torch.int64)
    rows = embeddings.EmbeddingCollection([embeddings.EmbeddingConfig(6, 3, "t", feature_names=["f"])])(
        KeyedJaggedTensor(["f"], nothing, lengths=nothing)
    )
    assert rows["f"].to_padded_dense().shape == (0, 0, 3)


def test_options_that_change_nothing_are_remembered():
    config = embeddings.EmbeddingConfig(name="t", num_embeddings=4, embedding_dim=2, feature_names=["f"])
    module = embeddings.EmbeddingCollection(tables=[config])
    assert not module.use_sorted_select()
    module.set_use_sorted_select(True)
    assert module.use_sorted_select()
    assert not embeddings.should_skip_data_parallel_grad_sync(module)
    embeddings.mark_data_parallel_skip_grad_sync(module)
    assert embeddings.should_skip_data_parallel_grad_sync(module)
    assert module._embedding_configs == [config]


def test_an_id_outside_a_table_of_sequences_is_an_index_error_too():
    table = embeddings.EmbeddingConfig(num_embeddings=4, embedding_dim=2, name="t", feature_names=["f"])
    collection = embeddings.EmbeddingCollection(tables=[table])
    features = KeyedJaggedTensor(["f"], torch.tensor([7]), lengths=torch.tensor([1]))
    for kind in (IndexError, ValueError):
        with pytest.raises(kind, match=r"'t'.*7"):
            collection(features)


def test_attributes_of_configs_can_be_set_and_collections_keep_theirs():
    config = embeddings.EmbeddingBagConfig(5, 2, "t", feature_names=["f"])
    collection = embeddings.EmbeddingBagCollection([config])
    config.pooling = PoolingType.MEAN
    config.num_embeddings = 9
    assert (config.pooling, config.num_embeddings) == (PoolingType.MEAN, 9)
    kept = collection.embedding_bag_configs()[0]
    assert (kept.pooling, kept.num_embeddings) == (PoolingType.SUM, 5)
    with pytest.raises(ValueError, match="NONE"):
        config.pooling = PoolingType.NONE
    with pytest.raises(ValueError, match=r"embedding_dim.*-1"):
        config.embedding_dim = -1
    assert (config.pooling, config.embedding_dim) == (PoolingType.MEAN, 2)
