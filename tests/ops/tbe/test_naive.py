from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from meshrec.ops.tbe import naive
from meshrec.ops.tbe.formulas import Hyper
from meshrec.ops.tbe.layout import MEAN, NONE, SUM

MODES = {SUM: "sum", MEAN: "mean"}
ROWS, DIMS = [5, 9, 3], [4, 7, 1]
KEYS, TABLES, POOLING = [2, 0, 2, 3], [0, 1, 1, 2], [SUM, MEAN, MEAN, SUM]
FEATURE_DIMS = [DIMS[table] for table in TABLES]
NUM_KEYS = 4  # key 1 is read by nobody, key 2 by two tables, table 1 by two keys
NAMES = torch.tensor(list(b"t0\ta\nt1\tb\nt1\tc\nt2\td\n"), dtype=torch.uint8)


class Batch(NamedTuple):
    weights: list[Tensor]
    values: Tensor
    offsets: Tensor
    sample_weights: Tensor | None
    segments: Tensor | None
    num_bags: Tensor
    """[blocks, keys]"""


def make_batch(num_bags, *, seed=0, weighted=False, id_dtype=torch.int64, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    num_bags = torch.tensor(num_bags)
    lengths = torch.randint(0, 5, (int(num_bags.sum()),), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    num_ids = int(lengths.sum())
    return Batch(
        weights=[torch.randn(e, d, generator=generator).to(dtype) for e, d in zip(ROWS, DIMS, strict=True)],
        values=torch.randint(0, min(ROWS), (num_ids,), generator=generator, dtype=id_dtype),
        offsets=offsets.to(id_dtype),
        sample_weights=torch.randn(num_ids, generator=generator) if weighted else None,
        segments=torch.cat([torch.zeros(1, dtype=torch.int64), num_bags.flatten().cumsum(0)]),
        num_bags=num_bags,
    )


def pieces(batch):
    """(block, feature, ids, offsets, sample weights) in the order of the flat output, cut out by hand."""
    offsets, bounds = batch.offsets.long(), batch.segments.tolist()
    for block in range(len(batch.num_bags)):
        for feature, key in enumerate(KEYS):
            segment = block * NUM_KEYS + key
            local = offsets[bounds[segment] : bounds[segment + 1] + 1]
            low, high = int(local[0]), int(local[-1])
            sample_weights = None if batch.sample_weights is None else batch.sample_weights[low:high]
            yield block, feature, batch.values[low:high].long(), local - low, sample_weights


def expected_pooled(batch):
    """Pieces of embedding_bag; weighted MEAN, which it lacks, is the weighted sum over the length."""
    result = []
    for block, feature, ids, offsets, sample_weights in pieces(batch):
        table = batch.weights[TABLES[feature]].float()
        mode = POOLING[feature] if sample_weights is None else SUM
        bags = embedding_bag(
            ids, table, offsets, mode=MODES[mode], per_sample_weights=sample_weights, include_last_offset=True
        )
        if POOLING[feature] != mode:
            bags = bags / offsets.diff().clamp(min=1)[:, None]
        result.append((block, bags))
    return result


def expected_2d(batch):
    found = expected_pooled(batch)
    blocks = [
        torch.cat([bags for at, bags in found if at == block], 1) for block in range(len(batch.num_bags))
    ]
    return torch.cat(blocks)


def forward(batch, *, flat=False, pooling=POOLING, segments=True, out_dtype=torch.float32, check_ids=True):
    if not flat:
        out_size = int(batch.num_bags[:, 0].sum())
    elif NONE in pooling:
        out_size = sum(ids.numel() * FEATURE_DIMS[f] for _, f, ids, _, _ in pieces(batch))
    else:
        out_size = sum(offsets.diff().numel() * FEATURE_DIMS[f] for _, f, _, offsets, _ in pieces(batch))
    return naive.tbe_forward(
        batch.weights,
        batch.values,
        batch.offsets,
        batch.sample_weights,
        batch.segments if segments else None,
        NUM_KEYS,
        KEYS,
        TABLES,
        pooling,
        flat,
        out_size,
        out_dtype,
        check_ids,
        NAMES,
    )


def gradient_args(batch, grad, *, flat=False, pooling=POOLING, tables=TABLES):
    return (
        (grad,),
        (batch.values, batch.offsets),
        (batch.segments, NUM_KEYS, KEYS, tables, pooling, flat, FEATURE_DIMS),
    )


ONE_BLOCK, TWO_BLOCKS, VARIABLE = [[3] * 4], [[2] * 4, [5] * 4], [[3, 1, 0, 2], [1, 1, 4, 2]]


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("num_bags", [ONE_BLOCK, TWO_BLOCKS, [[0] * 4]])
def test_pooled_forward_is_a_loop_over_embedding_bag(num_bags, weighted, id_dtype):
    batch = make_batch(num_bags, weighted=weighted, id_dtype=id_dtype)
    torch.testing.assert_close(forward(batch), expected_2d(batch))


def test_one_block_needs_no_segments():
    batch = make_batch(ONE_BLOCK)
    assert torch.equal(forward(batch, segments=False), forward(batch))


def test_forward_is_bit_identical_to_embedding_bag():
    batch = make_batch([[64] * 4])
    assert torch.equal(forward(batch), expected_2d(batch))


@pytest.mark.parametrize("num_bags", [TWO_BLOCKS, VARIABLE])
def test_flat_forward(num_bags):
    batch = make_batch(num_bags, weighted=True)
    expected = torch.cat([bags.flatten() for _, bags in expected_pooled(batch)])
    torch.testing.assert_close(forward(batch, flat=True), expected)


def test_sequence_forward_gives_a_row_per_id():
    batch = make_batch(VARIABLE)
    rows = [batch.weights[TABLES[feature]][ids].flatten() for _, feature, ids, _, _ in pieces(batch)]
    assert torch.equal(forward(batch, flat=True, pooling=[NONE] * 4), torch.cat(rows))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_sums_in_fp32(dtype):
    batch = make_batch([[16] * 4], dtype=dtype)
    torch.testing.assert_close(forward(batch), expected_2d(batch))
    assert torch.equal(forward(batch, out_dtype=dtype), forward(batch).to(dtype))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("num_bags", "flat"), [(ONE_BLOCK, False), (TWO_BLOCKS, False), (VARIABLE, True)])
def test_gradients_match_autograd(num_bags, flat, weighted):
    batch = make_batch(num_bags, weighted=weighted)
    for leaf in [*batch.weights, *([batch.sample_weights] if weighted else [])]:
        leaf.requires_grad_()
    found = expected_pooled(batch)
    out = torch.cat([bags.flatten() for _, bags in found]) if flat else expected_2d(batch)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(grad)
    expected = [weight.grad for weight in batch.weights]
    with torch.no_grad():
        head, middle, tail = gradient_args(batch, grad, flat=flat)
        dense = naive.tbe_dense_grad(*head, batch.weights, *middle, batch.sample_weights, *tail)
        sparse = naive.tbe_sparse_grad(*head, *middle, batch.sample_weights, *tail, ROWS)
        torch.testing.assert_close(dense, expected)
        for table, (rows, values) in enumerate(zip(sparse[::2], sparse[1::2], strict=True)):
            assert rows.tolist() == sorted(set(rows.tolist()))
            torch.testing.assert_close(
                torch.zeros_like(dense[table]).index_copy(0, rows, values), dense[table]
            )
        if weighted:
            by_weight = naive.tbe_sample_weight_grad(*head, batch.weights, *middle, *tail)
            torch.testing.assert_close(by_weight, batch.sample_weights.grad)


def test_sequence_gradients_match_autograd():
    batch = make_batch(VARIABLE)
    for weight in batch.weights:
        weight.requires_grad_()
    pooling = [NONE] * 4
    out = torch.cat(
        [batch.weights[TABLES[feature]][ids].flatten() for _, feature, ids, _, _ in pieces(batch)]
    )
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(grad)
    head, middle, tail = gradient_args(batch, grad, flat=True, pooling=pooling)
    with torch.no_grad():
        dense = naive.tbe_dense_grad(*head, batch.weights, *middle, None, *tail)
    torch.testing.assert_close(dense, [weight.grad for weight in batch.weights])


def update(batch, grad, state, optimizer, *, tables=TABLES, row_stats=None, **kwargs):
    hyper = Hyper(lr=0.1, eps=1e-8).as_tensor()
    head, middle, tail = gradient_args(batch, grad, tables=tables, **kwargs)
    naive.tbe_update(
        *head, *middle, batch.sample_weights, *tail, batch.weights, state, optimizer, hyper, row_stats, []
    )


def test_update_steps_each_touched_row_once():
    batch = make_batch(TWO_BLOCKS, weighted=True)
    before = [weight.clone() for weight in batch.weights]
    grad = torch.randn(7, sum(FEATURE_DIMS), generator=torch.Generator().manual_seed(1))
    head, middle, tail = gradient_args(batch, grad)
    dense = naive.tbe_dense_grad(*head, batch.weights, *middle, batch.sample_weights, *tail)
    state = [torch.zeros(rows) for rows in ROWS]
    update(batch, grad, state, 2)
    for weight, old, gradient, total in zip(batch.weights, before, dense, state, strict=True):
        mean_square = gradient.square().mean(1)
        torch.testing.assert_close(total, mean_square)
        torch.testing.assert_close(weight, old - 0.1 * gradient / (mean_square.sqrt() + 1e-8)[:, None])
    # Rows past the highest id are looked up by nobody.
    assert torch.equal(batch.weights[1][3:], before[1][3:])


def test_a_table_of_minus_one_skips_the_feature():
    batch = make_batch(ONE_BLOCK)
    before = [weight.clone() for weight in batch.weights]
    grad = torch.ones(3, sum(FEATURE_DIMS))
    update(batch, grad, [], 0, tables=[0, -1, -1, -1])
    assert not torch.equal(batch.weights[0], before[0])
    assert torch.equal(batch.weights[1], before[1])
    assert torch.equal(batch.weights[2], before[2])
    head, middle, tail = gradient_args(batch, grad, tables=[0, -1, -1, -1])
    sparse = naive.tbe_sparse_grad(*head, *middle, None, *tail, ROWS)
    assert [list(tensor.shape) for tensor in sparse[2:]] == [[0], [0, 0]] * 2


def test_row_stats_of_column_shards_give_the_update_of_the_whole():
    whole = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    ids, offsets = torch.tensor([4, 0, 3]), torch.tensor([0, 3])
    grad = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))

    def step(weight, gradient, total, row_stats, row_dim):
        hyper = Hyper(lr=0.1, eps=1e-8, row_dim=row_dim).as_tensor()
        width = weight.shape[1]
        args = (ids, offsets, None, None, 1, [0], [0], [NONE], True, [width], [weight], [total], 2, hyper)
        naive.tbe_update(gradient.flatten(), *args, row_stats, [])
        return weight, total

    expected, expected_total = step(whole.clone(), grad, torch.zeros(6), None, 0)
    stats = torch.stack([grad.square().sum(1), whole[ids].square().sum(1), torch.zeros(3)], 1)
    left, total = step(whole[:, :3].clone(), grad[:, :3], torch.zeros(6), stats, 8)
    right, _ = step(whole[:, 3:].clone(), grad[:, 3:], torch.zeros(6), stats, 8)
    torch.testing.assert_close(torch.cat([left, right], 1), expected)
    torch.testing.assert_close(total, expected_total)


def test_clamp_ids_counts_by_feature_and_leaves_the_input():
    values = torch.tensor([-1, 2, 7, 5, 9, 0], dtype=torch.int32)
    offsets = torch.tensor([0, 3, 6])
    clamped, counts = naive.clamp_ids(values, offsets, None, 2, [0, 1, 1, 1], [0, 0, 1, -1], [5, 9])
    assert clamped.tolist() == [0, 2, 0, 0, 0, 0]
    assert clamped.dtype == torch.int32
    assert counts.tolist() == [2, 2, 1, 0]
    assert values.tolist() == [-1, 2, 7, 5, 9, 0]


@pytest.mark.parametrize("bad", [-3, 812])
def test_ids_outside_the_table_name_table_feature_and_sample(bad):
    batch = make_batch(ONE_BLOCK)
    # The last id of key 3 lies in its last bag that is not empty.
    batch.values[-1] = bad
    sample = int(batch.offsets[-4:].diff().nonzero()[-1])
    message = (
        rf"table 't2': id {bad} of feature 'd' \(sample {sample}\) is outside \[0, 3\). Raise num_embeddings"
    )
    with pytest.raises(ValueError, match=message):
        forward(batch)


def test_nan_weights_are_found_only_when_checked():
    batch = make_batch(ONE_BLOCK, weighted=True)
    batch.sample_weights[-1] = float("nan")
    with pytest.raises(
        ValueError, match=r"table 't2': the weight of id \d+ of feature 'd' \(sample \d\) is NaN"
    ):
        forward(batch)
    assert forward(batch, check_ids=False).isnan().any()


@pytest.mark.parametrize("bad", [-1, 3])
def test_gradients_refuse_ids_outside_the_table(bad):
    batch = make_batch(ONE_BLOCK)
    batch.values[-1] = bad
    before = [weight.clone() for weight in batch.weights]
    with pytest.raises(ValueError, match=rf"'2'.*{bad}.*'3'.*\[0.*3"):
        update(batch, torch.ones(3, sum(FEATURE_DIMS)), [], 0)
    assert all(torch.equal(weight, old) for weight, old in zip(batch.weights, before, strict=True))


def test_wrong_sizes():
    batch = make_batch(ONE_BLOCK)
    num_ids = batch.values.numel()
    with pytest.raises(ValueError, match=f"{num_ids}.*1"):
        forward(batch._replace(sample_weights=torch.ones(1)))
    with pytest.raises(ValueError, match="float32"):
        forward(batch._replace(sample_weights=torch.ones(num_ids, dtype=torch.float64)))
    with pytest.raises(ValueError, match="sequence"):
        forward(batch._replace(sample_weights=torch.ones(num_ids)), flat=True, pooling=[NONE] * 4)
    with pytest.raises(ValueError, match=r"38 elements.*gave 57"):
        update(batch, torch.ones(2, sum(FEATURE_DIMS)), [], 0)
    with pytest.raises(ValueError, match=r"0 state.*3 tables.*1 state"):
        update(batch, torch.ones(3, sum(FEATURE_DIMS)), [], 2)
    with pytest.raises(ValueError, match="validate"):
        forward(batch._replace(values=batch.values[:-1]))
    with pytest.raises(ValueError, match=r"out_size.*5.*give 3"):
        forward(batch._replace(num_bags=torch.full((1, 4), 5)))
