import pytest
import torch

import meshrec
from meshrec.compat.bridge import embeddings
from meshrec.modules import DataType, PoolingType


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
    with pytest.raises(ValueError, match="table 't': MeshRec has no need_pos, got True"):
        config(need_pos=True)
    with pytest.raises(TypeError, match="no argument 'colour'"):
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


def test_ids_are_not_returned_as_weights():
    with pytest.raises(ValueError, match="need_indices"):
        embeddings.EmbeddingCollection([embeddings.EmbeddingConfig(4, 2, "t")], need_indices=True)


def test_types_and_words():
    assert embeddings.data_type_to_dtype(DataType.BF16) == torch.bfloat16
    assert embeddings.dtype_to_data_type(torch.float16) is DataType.FP16
    assert embeddings.pooling_type_to_str(PoolingType.MEAN) == "mean"
    with pytest.raises(ValueError, match=r"got torch\.int8"):
        embeddings.dtype_to_data_type(torch.int8)
    with pytest.raises(ValueError, match="pools nothing"):
        embeddings.pooling_type_to_str(PoolingType.NONE)
