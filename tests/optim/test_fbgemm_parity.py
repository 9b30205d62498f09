"""The fused optimizers against those of FBGEMM that have the same name.

Without weight decay: on a CPU FBGEMM 1.8 takes the argument and does not apply it.
"""

import warnings

import pytest
import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, fuse
from meshrec.optim import SGD, Adagrad, RowWiseAdagrad, RowWiseRMSpropAR

pytestmark = pytest.mark.peers

ROWS, DIMS, BATCH = [50, 11, 7], [16, 4, 32], 24


@pytest.fixture(scope="module")
def fbgemm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("fbgemm_gpu", reason="`make parity` installs it")
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation

    def make(optimizer, **numbers):
        if not hasattr(training.OptimType, optimizer):
            pytest.skip(f"this FBGEMM has no {optimizer}; 1.9.0 has")
        tables = [
            (rows, dim, EmbeddingLocation.HOST, training.ComputeDevice.CPU)
            for rows, dim in zip(ROWS, DIMS, strict=True)
        ]
        return training.SplitTableBatchedEmbeddingBagsCodegen(
            tables, optimizer=getattr(training.OptimType, optimizer), device=torch.device("cpu"), **numbers
        )

    return make


def make_ours(spec):
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(
            name=f"t{index}", num_embeddings=rows, embedding_dim=dim, feature_names=[f"f{index}"]
        )
        for index, (rows, dim) in enumerate(zip(ROWS, DIMS, strict=True))
    ]
    return fuse(EmbeddingBagCollection(tables), optimizer=spec)


def make_input(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (len(ROWS), BATCH), generator=generator)
    values = [
        torch.randint(0, rows, (int(count),), generator=generator)
        for rows, count in zip(ROWS, lengths.sum(1), strict=True)
    ]
    return KeyedJaggedTensor(["f0", "f1", "f2"], torch.cat(values), lengths=lengths)


@pytest.mark.parametrize(
    ("spec", "theirs", "numbers", "state"),
    [
        (SGD(lr=0.1), "EXACT_SGD", {"learning_rate": 0.1}, None),
        (Adagrad(lr=0.1, eps=1e-6), "EXACT_ADAGRAD", {"learning_rate": 0.1, "eps": 1e-6}, "sum"),
        (
            RowWiseAdagrad(lr=0.1, eps=1e-6),
            "EXACT_ROWWISE_ADAGRAD",
            {"learning_rate": 0.1, "eps": 1e-6},
            "sum",
        ),
        (
            RowWiseRMSpropAR(lr=0.1, eps=1e-6, ar_alpha=1.5, ema_beta=0.9, min_shrinkage=0.4),
            "ROWWISE_RMSPROP_AR",
            {"learning_rate": 0.1, "eps": 1e-6, "ar_alpha": 1.5, "ema_beta": 0.9, "min_shrinkage": 0.4},
            "sum",
        ),
    ],
    ids=["SGD", "Adagrad", "RowWiseAdagrad", "RowWiseRMSpropAR"],
)
def test_training_is_that_of_fbgemm(fbgemm, spec, theirs, numbers, state):
    ours, other = make_ours(spec), fbgemm(theirs, **numbers)
    for mine, weight in zip(ours.parameters(), other.split_embedding_weights(), strict=True):
        weight.copy_(mine.detach())
    for seed in range(5):
        features = make_input(seed)
        grad = torch.randn(BATCH, sum(DIMS), generator=torch.Generator().manual_seed(seed))
        expected = other(features.values(), features.offsets())
        result = ours(features).values()
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
        for output in (result, expected):
            output.backward(grad)
    for mine, weight in zip(ours.parameters(), other.split_embedding_weights(), strict=True):
        torch.testing.assert_close(mine.detach(), weight, rtol=1e-5, atol=1e-6)
    if state is not None:
        mine = [slots[state] for slots in ours.fused_optimizer.state.values()]
        for one, (theirs_state, *_) in zip(mine, other.split_optimizer_states(), strict=True):
            torch.testing.assert_close(one.flatten(), theirs_state.flatten(), rtol=1e-5, atol=1e-7)
