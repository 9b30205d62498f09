import io
import json
from types import SimpleNamespace

import pytest
import torch

from meshrec.compat.bridge.datasets import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES
from meshrec.compat.bridge.dlrm_predict import (
    BatchingMetadata,
    DLRMModelConfig,
    DLRMPredictFactory,
    create_training_batch,
)


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
@pytest.mark.filterwarnings(r"ignore:.torch.jit.\w+. is deprecated")
@pytest.mark.filterwarnings("ignore:The TorchScript type system:UserWarning")
def test_a_dlrm_for_inference_is_torchscript():
    batch = create_training_batch(SimpleNamespace(batch_size=3, num_embedding_features=26))
    config = DLRMModelConfig(
        dense_arch_layer_sizes=[8, 4],
        dense_in_features=len(DEFAULT_INT_NAMES),
        embedding_dim=4,
        id_list_features_keys=DEFAULT_CAT_NAMES,
        num_embeddings_per_feature=[30] * 26,
        num_embeddings=None,
        over_arch_layer_sizes=[5, 1],
        sample_input=batch,
    )
    factory = DLRMPredictFactory(config)
    model = factory.create_predict_module(world_size=1, device="cpu")
    inputs = {
        "float_features": batch.dense_features,
        "id_list_features.lengths": batch.sparse_features.lengths(),
        "id_list_features.values": batch.sparse_features.values(),
    }
    predictions = model(inputs)["default"]
    assert predictions.shape == (3,)
    file = io.BytesIO()
    torch.jit.save(model, file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(inputs)["default"], predictions)


def test_metadata_of_inputs_are_json():
    class Factory(DLRMPredictFactory):
        def batching_metadata(self):
            return {"float_features": BatchingMetadata("dense", "cpu", ["lengths"])}

    factory = Factory(None)
    expected = {"float_features": {"type": "dense", "device": "cpu", "pinned": ["lengths"]}}
    assert json.loads(factory.batching_metadata_json()) == expected
    assert factory.qualname_metadata_json() == "{}"
