import pytest
import torch
from torch import nn

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from meshrec.compat.bridge import sharding_plan as sp
from meshrec.compat.bridge.optimizers import EmbOptimType
from meshrec.compat.bridge.sharders import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    ModuleSharder,
)
from meshrec.distributed import sharders as own
from meshrec.optim import SGD, in_backward_spec

FUSED = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}


def bags():
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=4, embedding_dim=2, feature_names=[name])
        for name in ("fused", "dense", "copies")
    ]
    return EmbeddingBagCollection(tables)


def plan(module, **generators):
    return sp.construct_module_sharding_plan(module, generators, None, 1, 1, "cpu")


def test_fused_params_become_an_optimizer():
    assert EmbeddingBagCollectionSharder(fused_params=FUSED).optimizer == SGD(lr=0.5)
    assert EmbeddingCollectionSharder(FUSED).fused_params == FUSED
    assert EmbeddingBagCollectionSharder().optimizer is None


def test_the_plans_kernel_says_which_tables_are_fused(caplog):
    module = bags()
    module_plan = plan(
        module,
        fused=sp.table_wise(0, compute_kernel="fused"),
        dense=sp.table_wise(0),
        copies=sp.data_parallel(),
    )
    sharded = EmbeddingBagCollectionSharder(FUSED).shard(module, module_plan, None, torch.device("cpu"))
    specs = {name.split(".")[1]: in_backward_spec(p) for name, p in sharded.named_parameters()}
    assert specs == {"fused": SGD(lr=0.5), "dense": None, "copies": None}
    assert "['dense', 'copies'] with the compute kernel 'dense'" in caplog.text


def test_sequences_too():
    module = EmbeddingCollection(
        [EmbeddingConfig(name="t", num_embeddings=4, embedding_dim=2, feature_names=["f"])]
    )
    module_plan = plan(module, t=sp.table_wise(0, compute_kernel="fused"))
    sharded = EmbeddingCollectionSharder(FUSED).shard(module, params=module_plan)
    assert in_backward_spec(next(sharded.parameters())) == SGD(lr=0.5)


def test_answers_for_planners():
    sharder = EmbeddingBagCollectionSharder()
    assert "row_wise" in sharder.sharding_types("cpu")
    assert sharder.compute_kernels("data_parallel", "cpu") == ["dense"]
    assert sharder.compute_kernels("table_wise", "cpu") == ["fused"]
    assert list(sharder.shardable_parameters(bags())) == ["fused", "dense", "copies"]
    assert sharder.module_type is EmbeddingBagCollection


def test_the_type_of_all_sharders():
    assert isinstance(EmbeddingCollectionSharder(), ModuleSharder)
    assert isinstance(own.EmbeddingBagCollectionSharder(), ModuleSharder)
    assert not isinstance(bags(), ModuleSharder)
    assert ModuleSharder[nn.Module] is not None


def test_there_are_no_codecs():
    with pytest.raises(ValueError, match="MeshRec has no codecs to register"):
        EmbeddingBagCollectionSharder(qcomm_codecs_registry={})
