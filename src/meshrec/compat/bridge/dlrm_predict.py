"""TorchRec's inference example: a factory that quantizes, shards and scripts a DLRM."""

import abc
import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshrec.compat.bridge.datasets import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES, Batch, RandomRecDataset
from meshrec.compat.bridge.dlrm import DLRM
from meshrec.compat.bridge.embeddings import EmbeddingBagCollection, EmbeddingBagConfig
from meshrec.compat.bridge.fx import symbolic_trace
from meshrec.compat.bridge.inference import PredictModule, shard_quant_model
from meshrec.compat.bridge.quant import quantize_inference_model
from meshrec.compat.bridge.sparse import KeyedJaggedTensor


@dataclass
class BatchingMetadata:
    """Instructions to an inference server for batching one model input.

    Args:
        type: ``"dense"`` or ``"sparse"``.
        device: ``"cpu"`` or ``"cuda"``.
        pinned: name suffixes of the input's tensors to put into pinned memory.
    """

    type: str
    device: str
    pinned: list[str]


@dataclass
class QualNameMetadata:
    """Server metadata for one method. ``need_preproc``: whether the server preprocesses the inputs."""

    need_preproc: bool


class PredictFactory(abc.ABC):
    """Base class of factories that build a model for an inference server."""

    @abc.abstractmethod
    def create_predict_module(self) -> nn.Module:
        """Return the model."""

    @abc.abstractmethod
    def batching_metadata(self) -> dict[str, BatchingMetadata]:
        """Return how the server batches each input, by input name."""

    def batching_metadata_json(self) -> str:
        """Return ``batching_metadata`` as JSON."""
        return json.dumps({name: asdict(value) for name, value in self.batching_metadata().items()})

    @abc.abstractmethod
    def result_metadata(self) -> str:
        """Return the result type name, such as ``"dict_of_tensor"``."""

    @abc.abstractmethod
    def run_weights_independent_tranformations(self, predict_module: nn.Module) -> nn.Module:
        """Return the model after transformations that do not need weights."""

    @abc.abstractmethod
    def run_weights_dependent_transformations(self, predict_module: nn.Module) -> nn.Module:
        """Return the model after transformations that need weights."""

    def qualname_metadata(self) -> dict[str, QualNameMetadata]:
        """Return server metadata by method name; empty by default."""
        return {}

    def qualname_metadata_json(self) -> str:
        """Return ``qualname_metadata`` as JSON."""
        return json.dumps({name: asdict(value) for name, value in self.qualname_metadata().items()})

    def model_inputs_data(self) -> dict[str, Any]:
        """Return data for generating sample inputs; empty by default."""
        return {}


def create_training_batch(args: Any) -> Batch:
    """Return a random batch with Criteo's features.

    Args:
        args: namespace with ``batch_size``, and with ``num_embedding_features`` as the exclusive ID limit.
    """
    limit = args.num_embedding_features
    dataset = RandomRecDataset(
        DEFAULT_CAT_NAMES, args.batch_size, limit, ids_per_feature=1, num_dense=len(DEFAULT_INT_NAMES)
    )
    return next(iter(dataset))


@dataclass
class DLRMModelConfig:
    """Sizes of a DLRM, and a sample input.

    Args:
        dense_arch_layer_sizes: layer sizes of the dense MLP.
        dense_in_features: number of dense features.
        embedding_dim: width of all tables.
        id_list_features_keys: sparse features. Every feature has its own table.
        num_embeddings_per_feature: rows per table if ``num_embeddings`` is None.
        num_embeddings: rows in every table.
        over_arch_layer_sizes: layer sizes of the top MLP.
        sample_input: batch with which the model is called once.
    """

    dense_arch_layer_sizes: list[int]
    dense_in_features: int
    embedding_dim: int
    id_list_features_keys: list[str]
    num_embeddings_per_feature: list[int]
    num_embeddings: int | None
    over_arch_layer_sizes: list[int]
    sample_input: Batch


class DLRMPredictModule(PredictModule):
    """DLRM that maps a dict of tensors to predictions in [0, 1].

    Args:
        embedding_bag_collection: tables.
        dense_in_features: number of dense features.
        dense_arch_layer_sizes: layer sizes of the dense MLP.
        over_arch_layer_sizes: layer sizes of the top MLP.
        id_list_features_keys: sparse features, in the order of the lengths in a batch.
        dense_device: device for the dense layers.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: list[int],
        over_arch_layer_sizes: list[int],
        id_list_features_keys: list[str],
        dense_device: torch.device | None = None,
    ) -> None:
        sizes = (dense_in_features, dense_arch_layer_sizes, over_arch_layer_sizes)
        super().__init__(DLRM(embedding_bag_collection, *sizes, dense_device), dense_device)
        self.id_list_features_keys = id_list_features_keys

    def predict_forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the predictions, float32 [B] on the CPU, under ``"default"``.

        Args:
            batch: ``float_features`` [B, I], ``id_list_features.lengths`` [F B], and
                ``id_list_features.values`` [N].
        """
        features = KeyedJaggedTensor(
            keys=self.id_list_features_keys,
            lengths=batch["id_list_features.lengths"],
            values=batch["id_list_features.values"],
        )
        logits = self.predict_module(batch["float_features"], features)
        return {"default": logits.sigmoid().flatten().to("cpu", non_blocking=True).float()}


class DLRMPredictFactory(PredictFactory):
    """Factory that builds quantized and scripted DLRMs. Table rows are zeros until a state dict is loaded.

    Args:
        model_config: model sizes and a sample input.
    """

    def __init__(self, model_config: DLRMModelConfig) -> None:
        self.model_config = model_config

    def create_predict_module(self, world_size: int, device: str) -> nn.Module:  # type: ignore[override]
        """Return the scripted model."""
        sizes = self.model_config
        keys = sizes.id_list_features_keys
        # `num_embeddings` replaces the sizes per feature, if given.
        rows = sizes.num_embeddings_per_feature
        if sizes.num_embeddings is not None:
            rows = [sizes.num_embeddings] * len(keys)
        tables = [
            EmbeddingBagConfig(
                name=f"t_{key}", embedding_dim=sizes.embedding_dim, num_embeddings=count, feature_names=[key]
            )
            for key, count in zip(keys, rows, strict=True)
        ]
        module = DLRMPredictModule(
            # Avoids allocating float tables that are never read: the caller's state dict supplies the
            # weights.
            EmbeddingBagCollection(tables, device="meta"),
            sizes.dense_in_features,
            sizes.dense_arch_layer_sizes,
            sizes.over_arch_layer_sizes,
            keys,
            torch.device(device),
        )
        model, _ = shard_quant_model(
            quantize_inference_model(module), compute_device=device, sharding_device=device
        )
        sparse = sizes.sample_input.sparse_features
        batch = {
            "float_features": sizes.sample_input.dense_features.to(device),
            "id_list_features.lengths": sparse.lengths().to(device),
            "id_list_features.values": sparse.values().to(device),
        }
        scripted: nn.Module = torch.jit.script(symbolic_trace(model))
        # The first call specializes the TorchScript graph. A server should not pay for that on a request.
        scripted(batch)
        return scripted

    def batching_metadata(self) -> dict[str, str]:  # type: ignore[override]
        return {"float_features": "dense", "id_list_features": "sparse"}

    def result_metadata(self) -> str:
        return "dict_of_tensor"

    def run_weights_independent_tranformations(self, predict_module: nn.Module) -> nn.Module:
        return predict_module

    def run_weights_dependent_transformations(self, predict_module: nn.Module) -> nn.Module:
        return predict_module
