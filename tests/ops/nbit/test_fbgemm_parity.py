"""Rows and lookups against FBGEMM's."""

import warnings

import pytest
import torch
from torch.testing import assert_close

from meshrec.ops import nbit
from meshrec.ops.tbe import LookupOptions, Lookups

pytestmark = pytest.mark.peers

ROWS, BATCH = 300, 50


@pytest.fixture(scope="module")
def fbgemm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("fbgemm_gpu", reason="`make parity` installs it")
        from fbgemm_gpu import split_table_batched_embeddings_ops_inference as inference
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    return inference, EmbeddingLocation


def corner_rows(dim):
    generator = torch.Generator().manual_seed(dim)
    weight = torch.randn(ROWS, dim, generator=generator)
    scales = torch.logspace(-12, 4, ROWS // 2)
    weight[: ROWS // 2] *= scales[:, None]
    weight[-1], weight[-2], weight[-3], weight[-4] = 0.0, 0.3, -0.1, -0.0
    weight[-5] = 1e-9 * torch.arange(dim)
    weight[-6] = torch.arange(dim) / 2
    weight[-7] = torch.where(torch.arange(dim) % 2 == 0, 0.0, -0.0)
    weight[-8] = torch.where(torch.arange(dim) % 2 == 1, 0.0, -0.0)
    return weight


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dim", [8, 16, 24, 64, 104, 304])
def test_rows_bit_for_bit(fbgemm, bits, dim):
    weight = corner_rows(dim)
    theirs = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(weight, bits)
    ours = nbit.to_fbgemm_bytes(nbit.quantize(weight, bits), bits, dim)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_lookups(fbgemm, bits, weighted):
    inference, location = fbgemm
    dim = 64
    weight = torch.randn(ROWS, dim)
    rows = nbit.quantize(weight, bits)
    kind = getattr(inference.SparseType, f"INT{bits}")
    op = inference.IntNBitTableBatchedEmbeddingBagsCodegen(
        [("t", ROWS, dim, kind, location.HOST)], output_dtype=inference.SparseType.FP32, device="cpu"
    )
    op.fill_random_weights()
    memory, params = op.split_embedding_weights()[0]
    if params is None:  # a row begins with its scale and bias
        memory[:, :4], memory[:, 4:] = rows[:, :4], rows[:, 4 : memory.shape[1]]
    else:
        memory.copy_(rows[:, 4 : 4 + memory.shape[1]])
        params.copy_(rows[:, :4])
    lengths = torch.randint(0, 9, [BATCH])
    ids = torch.randint(0, ROWS, [int(lengths.sum())])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    sample_weights = torch.randn(len(ids)) if weighted else None
    theirs = op(ids.int(), offsets.int(), sample_weights)
    lookups = Lookups(ids, offsets, sample_weights, None, 1, [0], [0], [0], False, [dim])
    names = torch.empty(0, dtype=torch.uint8)
    ours = nbit.forward([bits], [rows], lookups, LookupOptions(BATCH, torch.float32, True, names))
    assert_close(ours, theirs, rtol=1e-6, atol=1e-6 * float(theirs.abs().max()))
