"""DLRM_DCN with the weights that TorchRec's has for a seed."""

from collections.abc import Sequence

import torch

from meshrec.compat.bridge.adapted import Adapted
from meshrec.models import dlrm as own
from meshrec.modules import EmbeddingBagCollection, LowRankCrossNet


def _dcn(
    embedding_bag_collection: EmbeddingBagCollection,
    dense_in_features: int,
    dense_arch_layer_sizes: Sequence[int],
    over_arch_layer_sizes: Sequence[int],
    dcn_num_layers: int,
    dcn_low_rank_dim: int,
    dense_device: torch.device | None = None,
) -> own.DLRM_DCN:
    """MeshRec's ``DLRM_DCN``. TorchRec's draws the weights of a DLRM first and then replaces some."""
    sizes = (dense_in_features, dense_arch_layer_sizes, over_arch_layer_sizes)
    first = own.DLRM(embedding_bag_collection, *sizes, dense_device)
    with torch.random.fork_rng(devices=[]):
        model = own.DLRM_DCN(embedding_bag_collection, *sizes, dcn_num_layers, dcn_low_rank_dim, dense_device)
    width = (first.sparse_arch.F + 1) * first.sparse_arch.D
    model.dense_arch = first.dense_arch
    crossnet = LowRankCrossNet(width, dcn_num_layers, dcn_low_rank_dim, dense_device)
    model.inter_arch = own.InteractionDCNArch(first.sparse_arch.F, crossnet)
    model.over_arch = own.OverArch(width, over_arch_layer_sizes, dense_device)
    return model


DLRM_DCN = Adapted(own.DLRM_DCN, _dcn)
