import pytest
import torch
from torch import nn

from meshrec import DataType, KeyedJaggedTensor, PoolingType
from meshrec.compat.bridge import embeddings, quant
from meshrec.compat.bridge.inference import DEFAULT_SHARDERS, shard_quant_model
from meshrec.compat.bridge.planner import ParameterConstraints
from meshrec.compat.bridge.pruning import set_pruning_data
from meshrec.compat.bridge.quant_tables import (
    QuantTableGroup,
    TableSpec,
    assign_weights_to_tbe,
    get_table_to_weights_from_tbe,
)


class Model(nn.Module):
    def __init__(self, pooling=PoolingType.SUM):
        super().__init__()
        tables = [
            embeddings.EmbeddingBagConfig(20, 8, "t0", feature_names=["f0"], pooling=pooling),
            embeddings.EmbeddingBagConfig(12, 8, "t1", feature_names=["f1"]),
        ]
        self.ebc = embeddings.EmbeddingBagCollection(tables)

    def forward(self, features):
        return self.ebc(features).values()


def batch():
    return KeyedJaggedTensor(["f0", "f1"], torch.tensor([1, 19, 7]), lengths=torch.tensor([2, 0, 0, 1]))


def test_tables_are_grouped_by_pooling():
    model = quant.quantize_inference_model(
        Model(PoolingType.MEAN), per_table_weight_dtype={"t1": torch.quint4x2}
    )
    groups = model.ebc.tbes
    assert [[spec.name for spec in group.embedding_specs] for group in groups] == [["t0"], ["t1"]]
    assert groups[1].embedding_specs[0].data_type is DataType.INT4
    assert len(quant.quantize_inference_model(Model()).ebc.tbes) == 1


@pytest.mark.parametrize("kind", [None, "table_wise", "row_wise"])
def test_rows_of_one_model_are_given_to_another(kind):
    source = quant.quantize_inference_model(Model(), per_table_weight_dtype={"t0": torch.quint8})
    target = quant.quantize_inference_model(Model())
    expected = source(batch())
    if kind is not None:
        constraints = {name: ParameterConstraints(sharding_types=[kind]) for name in ("t0", "t1")}
        target, _ = shard_quant_model(target, 2, "cpu", "cpu", constraints=constraints)
    assert not torch.equal(target(batch()), expected)
    assign_weights_to_tbe(target, get_table_to_weights_from_tbe(source))
    assert torch.equal(target(batch()), expected)
    rows, _ = get_table_to_weights_from_tbe(target)["t0"]
    assert torch.equal(rows, get_table_to_weights_from_tbe(source)["t0"][0])


def test_a_rank_assigns_the_rows_that_it_splits_off():
    local = [torch.zeros(3, 12, dtype=torch.uint8), torch.zeros(2, 12, dtype=torch.uint8)]
    group = QuantTableGroup([TableSpec("t", 20, 8, DataType.INT8)], [local])
    rows = torch.arange(60, dtype=torch.uint8).view(5, 12)
    group.assign_embedding_weights([(rows, None)])
    assert torch.equal(group.split_embedding_weights()[0][0], rows)
    assert torch.equal(local[1], rows[3:])


def test_rows_that_do_not_fit_change_nothing():
    model = quant.quantize_inference_model(Model())
    before = get_table_to_weights_from_tbe(model)
    wrong = {
        **get_table_to_weights_from_tbe(quant.quantize_inference_model(Model())),
        "t1": (torch.ones(3, 2), None),
    }
    with pytest.raises(ValueError, match=r"'t1'.*\[3, 2\]"):
        assign_weights_to_tbe(model, wrong)
    with pytest.raises(ValueError, match="'t1'"):
        assign_weights_to_tbe(model, {"t0": before["t0"]})
    assert torch.equal(model.ebc.tbes[0].split_embedding_weights()[0][0], before["t0"][0])


def test_parts_of_columns_have_scales_of_their_own():
    constraints = {"t0": ParameterConstraints(sharding_types=["column_wise"], min_partition=4)}
    model, plan = shard_quant_model(
        quant.quantize_inference_model(Model()), 2, "cpu", "cpu", constraints=constraints
    )
    if len(plan.plan["ebc"]["t0"].sharding_spec.shards) > 1:
        with pytest.raises(ValueError, match="'t0'"):
            get_table_to_weights_from_tbe(model)


def test_configs_say_how_many_rows_pruning_has_left():
    model = quant.quantize_inference_model(set_pruning_data(Model(), {"t1": 9}))
    left = [config.num_embeddings_post_pruning for config in model.ebc.embedding_bag_configs()]
    assert left == [None, 9]
    assert get_table_to_weights_from_tbe(model)["t1"][0].shape[0] == 9


def test_default_sharders_share_no_options():
    bags, sequences = DEFAULT_SHARDERS
    name = next(iter(bags.fused_params))
    before = sequences.fused_params[name]
    bags.fused_params[name] = "changed"
    assert sequences.fused_params[name] == before
    bags.fused_params[name] = before
