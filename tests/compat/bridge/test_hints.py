import inspect
import logging

import pytest
import torch
from torch import nn

from meshrec.compat.bridge import embeddings, quant, train_pipeline
from meshrec.compat.bridge.hints import MEMORY, take_hints
from tests.compat.bridge.test_quant import tables

# Parameters of TorchRec 1.8's constructors, in their order.
BAGS = (
    "tables is_weighted device output_dtype table_name_to_quantized_weights register_tbes "
    "quant_state_dict_split_scale_bias row_alignment cache_features_order"
)
IDS = BAGS.replace("is_weighted device", "device need_indices")
SPARSE_DIST = (
    "model optimizer device execute_all_batches apply_jit context_type pipeline_postproc custom_model_fwd "
    "dmp_collection_sync_interval_batches enqueue_batch_after_forward enable_inplace_copy_batch "
    "free_features_storage_early clear_data_dist_inputs"
)
SEMI_SYNC = (
    "model optimizer device execute_all_batches apply_jit start_batch stash_gradients pipeline_postproc "
    "custom_model_fwd strict dmp_collection_sync_interval_batches enable_inplace_copy_batch "
    "free_features_storage_early clear_data_dist_inputs"
)
VALUES = {
    "dmp_collection_sync_interval_batches": 4,
    "row_alignment": 1,
}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (quant.EmbeddingBagCollection, BAGS),
        (quant.EmbeddingCollection, IDS),
        (train_pipeline.TrainPipelineSparseDist, SPARSE_DIST),
        (train_pipeline.TrainPipelineSemiSync, SEMI_SYNC),
    ],
)
def test_constructors_take_torchrecs_arguments(kind, names):
    """Those by position stand in TorchRec's order; the rest are taken by name."""
    mine = [each for each in inspect.signature(kind).parameters.values() if each.name != "hints"]
    wanted = names.split()
    assert [each.name for each in mine] == wanted[: len(mine)]
    rest = {name: VALUES.get(name, True) for name in wanted[len(mine) :]}
    if kind in (quant.EmbeddingBagCollection, quant.EmbeddingCollection):
        configs = (
            tables()
            if kind is quant.EmbeddingBagCollection
            else [
                embeddings.EmbeddingConfig(
                    num_embeddings=20, embedding_dim=8, name="t0", feature_names=["ft0"]
                )
            ]
        )
        more = {"is_weighted": False} if kind is quant.EmbeddingBagCollection else {}
        kind(configs, **more, **rest)
        with pytest.raises(ValueError, match="FBGEMM"):
            kind(configs, **more, table_name_to_quantized_weights={"t0": None})
    else:
        model = nn.Linear(2, 2)
        kind(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu"), **rest)
    with pytest.raises(TypeError, match="'colour'"):
        kind(*[None] * 3, colour=1)


def test_what_has_no_effect_is_said_once(caplog):
    with caplog.at_level(logging.INFO, logger="meshrec.compat"):
        for _ in range(2):
            take_hints("Owner", {"clear_data_dist_inputs": True}, MEMORY)
        take_hints("Owner", {"enable_inplace_copy_batch": False}, MEMORY)
    told = [each.getMessage() for each in caplog.records if each.name == "meshrec.compat"]
    assert told == ["Owner: clear_data_dist_inputs=True changes nothing here; the numbers are the same"]
