"""The compiled updates and weight gradients against naive.py: optimizers, dtypes, layouts, sizes, threads."""

import pytest
import torch
from torch.testing import assert_close

from meshrec.ops import operators
from meshrec.ops.tbe import naive
from meshrec.ops.tbe.formulas import FORMULAS, Hyper, OptimizerKind
from meshrec.ops.tbe.layout import MEAN, NONE, SUM

ADAGRAD = OptimizerKind.ADAGRAD.code
ADAM = OptimizerKind.ADAM.code
LAMB = OptimizerKind.LAMB.code
LARS = OptimizerKind.LARS.code
PARTIAL_ROW_WISE_ADAM = OptimizerKind.PARTIAL_ROW_WISE_ADAM.code
PARTIAL_ROW_WISE_LAMB = OptimizerKind.PARTIAL_ROW_WISE_LAMB.code
RMSPROP_AR = OptimizerKind.ROW_WISE_RMSPROP_AR.code
ROW_WISE_ADAGRAD = OptimizerKind.ROW_WISE_ADAGRAD.code
SGD = OptimizerKind.SGD.code

OPS = operators
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PRECISION = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
ROW, ELEMENT = 1, 2
SLOTS = {formula.code: [ROW if slot.per_row else ELEMENT for slot in formula.slots] for formula in FORMULAS}
DECAYS = {"none": 0, "L2": 1, "decoupled": 2}


def make_hyper(*, mode=0, step=3, seed=0, row_dim=0, lr=0.05):
    return Hyper(
        lr=lr,
        eps=1e-3,
        weight_decay=0.1,
        decay_mode=mode,
        beta1=0.9,
        beta2=0.999,
        momentum=0.7,
        trust_coefficient=0.02,
        beta=0.3,
        l1=0.2,
        l2=0.1,
        ar_alpha=3.0,
        min_shrinkage=0.6,
        step=step,
        seed=seed,
        row_dim=row_dim,
    ).as_tensor()


def make_state(case, optimizer):
    """As after some steps: no slot is zero, none like another."""
    generator = torch.Generator().manual_seed(2)
    return [
        torch.rand(weight.shape[:dims], generator=generator) * 0.1 + 0.01
        for dims in SLOTS[optimizer]
        for weight in case.weights
    ]


def updated(ops, case, grad, optimizer, hyper, row_stats=None):
    case, state = case.copied(), make_state(case, optimizer)
    case.update(ops, grad, state, optimizer, hyper, row_stats)
    return case.weights, state


def assert_same_weights(found, expected):
    """fp32: close. Else: equal, but for the few results that lie next to where rounding turns."""
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        if a.dtype == torch.float32:
            assert_close(a, b, rtol=1e-5, atol=1e-6)
        else:
            assert_close(a, b, rtol=PRECISION[a.dtype], atol=1e-6)
            assert (a != b).sum() <= 1 + a.numel() / 1000


def check_update(case, optimizer, hyper, *, grad=None, row_stats=None):
    grad = case.gradient() if grad is None else grad
    weights, state = updated(OPS, case, grad, optimizer, hyper, row_stats)
    expected_weights, expected_state = updated(naive, case, grad, optimizer, hyper, row_stats)
    assert_same_weights(weights, expected_weights)
    assert_close(state, expected_state, rtol=1e-5, atol=1e-6)
    return weights, state


def touched_rows(case):
    """Per table the rows that some feature reads."""
    rows = case.sparse_grad(naive, case.gradient())[::2]
    assert any(row.numel() for row in rows)
    return rows


@pytest.mark.parametrize("mode", DECAYS.values(), ids=list(DECAYS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("optimizer", SLOTS)
def test_every_optimizer_equals_naive(make_case, optimizer, dtype, mode):
    case = make_case(num_bags=((9,) * 4, (4,) * 4), weighted=True, dtype=dtype)
    rows = touched_rows(case)
    results = []
    for seed in (0, 2**40 + 7):
        weights, state = check_update(case, optimizer, make_hyper(mode=mode, seed=seed))
        results.append(weights)
        old_state = make_state(case, optimizer)
        for tensors, olds in ((weights, case.weights), (state, old_state)):
            for k, (tensor, old) in enumerate(zip(tensors, olds, strict=True)):
                untouched = torch.ones(len(old), dtype=torch.bool)
                untouched[rows[k % len(rows)]] = False
                assert torch.equal(tensor[untouched], old[untouched])
    rounded_alike = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert rounded_alike == (dtype == torch.float32)


def test_parts_are_rounded_as_the_whole(make_case):
    """Rows 1 to 3 of columns 5 to 8, at their origin, against the same elements of the whole table."""
    generator = torch.Generator().manual_seed(5)
    whole = torch.randn(4, 9, generator=generator).to(torch.bfloat16)
    grad = torch.randn(3, 9, generator=generator)
    hyper = make_hyper(seed=7)
    for ops in (OPS, naive):
        expected, part = whole.clone(), whole[1:, 5:].clone()
        for weight, origin in ((expected, [0, 0]), (part, [1, 5])):
            first, width = 1 - origin[0], weight.shape[1]
            ids, offsets = torch.arange(first, first + 3), torch.tensor([0, 3])
            lookups = (ids, offsets, None, None, 1, [0], [0], [NONE], True, [width])
            chosen = grad[:, origin[1] :].reshape(-1)
            ops.tbe_update(chosen, *lookups, [weight], [], SGD, hyper, None, origin)
        assert torch.equal(expected[1:, 5:], part)
        with pytest.raises((ValueError, RuntimeError), match="origins"):
            ops.tbe_update(chosen, *lookups, [weight], [], SGD, hyper, None, [1])


@pytest.mark.parametrize("optimizer", SLOTS)
def test_first_step_from_empty_state(make_case, optimizer):
    """The corrections 1 - beta^t are smallest at step 1, where a badly rounded 1 - beta would show."""
    case = make_case(num_bags=((9,) * 4,))
    grad, hyper = case.gradient(), make_hyper(step=1, lr=1.0)
    results = []
    for ops in (OPS, naive):
        each = case.copied()
        state = [torch.zeros_like(s) for s in make_state(case, optimizer)]
        each.update(ops, grad, state, optimizer, hyper)
        results.append((each.weights, state))
    assert_close(results[0], results[1], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 4, 8, 17, 31, 32, 64, 100, 128, 256, 300, 2100])
def test_every_width(make_case, width, dtype):
    case = make_case(rows=(40, 3, 20), dims=(width,) * 3, id_dtype=torch.int32, weighted=True, dtype=dtype)
    once = make_case(rows=(5000, 3, 9000), dims=(width,) * 3, pooling=(SUM,) * 4, dtype=dtype)
    for optimizer in (
        SGD,
        ROW_WISE_ADAGRAD,
        PARTIAL_ROW_WISE_LAMB,
    ):
        check_update(case, optimizer, make_hyper(mode=1))
        check_update(once if width < 300 else case, optimizer, make_hyper())
    grad = case.gradient()
    assert_close(case.dense_grad(OPS, grad), case.dense_grad(naive, grad))
    assert_close(case.sparse_grad(OPS, grad), case.sparse_grad(naive, grad))


ONE_BLOCK, BLOCKS, VARIABLE = ((5,) * 4,), ((2,) * 4, (0,) * 4, (7,) * 4), ((3, 1, 0, 2), (1, 6, 4, 2))
SHAPES = {
    "one block": {"num_bags": ONE_BLOCK},
    "blocks": {"num_bags": BLOCKS},
    "one block, flat": {"num_bags": ONE_BLOCK, "flat": True},
    "blocks of any size, flat": {"num_bags": VARIABLE, "flat": True},
    "sequences": {"num_bags": VARIABLE, "flat": True, "pooling": (NONE,) * 4},
    "sums": {"num_bags": BLOCKS, "pooling": (SUM,) * 4},
    "means": {"num_bags": BLOCKS, "pooling": (MEAN,) * 4},
    "long bags": {"num_bags": ONE_BLOCK, "longest": 60},
    "no samples": {"num_bags": ((0,) * 4,)},
    "no ids": {"num_bags": ONE_BLOCK, "longest": 0},
}


@pytest.mark.parametrize("tables", [[0, 1, 1, 2], [0, -1, 1, -1], [-1, -1, -1, -1]], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_every_layout(make_case, name, tables):
    shape = SHAPES[name]
    for weighted in (False, True):
        if weighted and NONE in shape.get("pooling", ()):
            continue
        for id_dtype in (torch.int32, torch.int64):
            dtype = tuple(DTYPES)  # one dtype per table
            case = make_case(**shape, weighted=weighted, id_dtype=id_dtype, dtype=dtype)
            case = case._replace(tables=tables)
            check_update(case, ROW_WISE_ADAGRAD, make_hyper())
            check_update(case, ADAM, make_hyper(mode=2))
            grad = case.gradient()
            assert_close(case.dense_grad(OPS, grad), case.dense_grad(naive, grad))
            assert_close(case.sparse_grad(OPS, grad), case.sparse_grad(naive, grad))


LAST = 29
BAGS = {
    "one id": [[3]],
    "one id among empty bags": [[], [3], []],
    "rows at both ends": [[0, LAST], [LAST], [0]],
    "repeated ids": [[2, 2, 2], [2, 7, 2], [7]],
    "one huge bag": [[], [i % 30 for i in range(5000)], [1]],
    "one hot row": [[7] * 3000, [7], [7] * 2000],
    "a hot row in many bags": [[7]] * 6000,
    "a hot row among others": [[7, i % 30] for i in range(4000)],
}


@pytest.mark.parametrize(("pooling", "weighted"), [(SUM, False), (SUM, True), (MEAN, True), (NONE, False)])
@pytest.mark.parametrize("name", BAGS)
def test_odd_bags(one_table, name, pooling, weighted):
    case = one_table(BAGS[name], LAST + 1, 12, pooling=pooling, weighted=weighted, flat=pooling == NONE)
    check_update(case, ADAGRAD, make_hyper())
    grad = case.gradient()
    assert_close(case.sparse_grad(OPS, grad), case.sparse_grad(naive, grad))


STATS_USERS = [
    ROW_WISE_ADAGRAD,
    PARTIAL_ROW_WISE_ADAM,
    LAMB,
    PARTIAL_ROW_WISE_LAMB,
    LARS,
    RMSPROP_AR,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("optimizer", STATS_USERS)
def test_sums_of_whole_rows(make_case, one_table, optimizer, dtype):
    """Distinct ids; the sums differ from what the kernel would compute, and from row to row."""
    ids = torch.randperm(400, generator=torch.Generator().manual_seed(3))[:150].tolist()
    case = one_table([ids[:70], [], ids[70:]], 400, 20, pooling=NONE, flat=True, dtype=dtype)
    stats = torch.rand(150, 3, generator=torch.Generator().manual_seed(4)) * 50
    stats[5:7, 0] = stats[7:9, 1] = stats[9:11, 2] = 0
    for mode in DECAYS.values():
        hyper = make_hyper(mode=mode, row_dim=52)
        given = check_update(case, optimizer, hyper, row_stats=stats)
        own = updated(OPS, case, case.gradient(), optimizer, hyper)
        assert not torch.equal(given[0][0], own[0][0])
        spread = updated(OPS, case, case.gradient(), optimizer, hyper, stats.T.contiguous().T)
        assert torch.equal(spread[0][0], given[0][0])


SQUARED = {
    "pooled": {"num_bags": BLOCKS},
    "weighted": {"num_bags": BLOCKS, "weighted": True},
    "sequences": {"num_bags": BLOCKS, "flat": True, "pooling": (NONE,) * 4},
    "no ids": {"num_bags": BLOCKS, "longest": 0},
}


def updated_by_runs(ops, case, grad, optimizer, hyper, means_of):
    """In two halves, between which the means over whole rows become known."""
    case, state = case.copied(), make_state(case, optimizer)
    squares, _, runs = case.row_squares(ops, grad)
    case.update(ops, grad, state, optimizer, hyper, runs=runs, mean_squares=means_of(squares))
    return case.weights, state


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SQUARED.values(), ids=list(SQUARED))
def test_squares_of_rows_and_the_update_with_their_means(make_case, shape, dtype):
    case = make_case(**shape, dtype=dtype)
    grad = case.gradient() / 8
    squares, counts, _ = case.row_squares(OPS, grad)
    expected_squares, expected_counts, _ = case.row_squares(naive, grad)
    assert torch.equal(counts, expected_counts)
    assert_close(squares, expected_squares, rtol=1e-5, atol=1e-6)

    def means(squares):
        return squares / 52 + torch.arange(squares.numel()) % 3

    for optimizer in (ROW_WISE_ADAGRAD, PARTIAL_ROW_WISE_ADAM, RMSPROP_AR):
        found = updated_by_runs(OPS, case, grad, optimizer, make_hyper(), means)
        expected = updated_by_runs(naive, case, grad, optimizer, make_hyper(), means)
        assert_same_weights(found[0], expected[0])
        assert_close(found[1], expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.threads
@pytest.mark.parametrize("width", [12, 32, 64])
@pytest.mark.parametrize("weighted", [False, True])
def test_threads_do_not_show_in_updates_by_runs(make_case, set_threads, weighted, width):
    """Nor do the halves: with the means of the table's own rows the update is the one in one go."""
    case = make_case(
        rows=(20_000, 40, 3000), dims=(width,) * 3, num_bags=((3000,) * 4,) * 2, weighted=weighted
    )
    case.values[: len(case.values) // 8] = 7
    grad, hyper = case.gradient(exact=False), make_hyper()
    for optimizer in (ROW_WISE_ADAGRAD, PARTIAL_ROW_WISE_ADAM, RMSPROP_AR):
        expected = updated(OPS, case, grad, optimizer, hyper)
        for threads in (1, 2, 5):
            set_threads(threads)
            found = updated_by_runs(OPS, case, grad, optimizer, hyper, lambda squares: squares / width)
            for a, b in zip(found[0] + found[1], expected[0] + expected[1], strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["expanded rows", "expanded number", "strided", "transposed", "offset"])
def test_gradients_need_not_be_contiguous(make_case, how, grad_dtype):
    case = make_case(num_bags=BLOCKS)
    grad = case.gradient().to(grad_dtype)
    grad = {
        "expanded rows": grad[:1].expand_as(grad),
        "expanded number": grad[:1, :1].expand_as(grad),
        "strided": grad.repeat_interleave(2, 1)[:, ::2],
        "transposed": grad.T.contiguous().T,
        "offset": torch.cat([grad.flatten()[:3], grad.flatten()])[3:].view_as(grad),
    }[how]
    dense = grad.float().contiguous()
    found = updated(OPS, case, grad, ADAGRAD, make_hyper())
    expected = updated(OPS, case, dense, ADAGRAD, make_hyper())
    assert all(torch.equal(a, b) for a, b in zip(found[0] + found[1], expected[0] + expected[1], strict=True))
    check_update(case, ADAGRAD, make_hyper(), grad=grad)
    assert_close(case.sparse_grad(OPS, grad), case.sparse_grad(naive, dense))


# (ids, about; rows; threads): tables are cut into ranges of rows from 4096 to 65536 ids on, by the size of
# the batch and the threads; one with many rows and few ids is sorted whole, in three passes.
LARGE = [(5000, 300, 2), (5000, 2, 2), (3000, 5_000_000, 2), (20_000, 70_001, 2), (300_000, 100_000, 1)]


@pytest.mark.threads
@pytest.mark.parametrize(("num_ids", "num_rows", "threads"), LARGE)
def test_large_batches(make_case, set_threads, num_ids, num_rows, threads):
    case = make_case(
        rows=(num_rows,),
        dims=(2,),
        keys=(0, 1),
        tables=(0, 0),
        pooling=(SUM, MEAN),
        num_bags=((num_ids // 8,) * 2,) * 2,
    )
    case.values[: len(case.values) // 4] = num_rows // 3  # a hot row, as large as a range
    case.values[-1], case.values[-2] = num_rows - 1, 0
    set_threads(threads)
    grad = case.gradient()
    rows, sums = case.sparse_grad(OPS, grad)
    rows_expected, sums_expected = case.sparse_grad(naive, grad)
    assert torch.equal(rows, rows_expected)
    assert_close(sums, sums_expected, rtol=1e-5, atol=1e-3)
    check_update(case, ROW_WISE_ADAGRAD, make_hyper(), grad=grad / 8)


@pytest.mark.threads
@pytest.mark.parametrize("weighted", [False, True])
def test_threads_do_not_show_in_updates(make_case, set_threads, weighted):
    case = make_case(
        rows=(20_000, 40, 3000), num_bags=((5000,) * 4, (777,) * 4), weighted=weighted, dtype=tuple(DTYPES)
    )
    case.values[: len(case.values) // 8] = 7
    grad = case.gradient(exact=False)
    results = []
    for threads in (1, 2, 5):
        set_threads(threads)
        found = [*case.dense_grad(OPS, grad), *case.sparse_grad(OPS, grad)]
        for optimizer in (
            SGD,
            ROW_WISE_ADAGRAD,
            LAMB,
        ):
            for tensors in updated(OPS, case, grad, optimizer, make_hyper(seed=3)):
                found += tensors
        results.append(found)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


@pytest.mark.threads
@pytest.mark.parametrize("weighted", [False, True])
def test_batches_that_outgrow_the_caches(make_case, set_threads, weighted):
    """A table's 1 to 2 MiB of pairs and gradients are worked on alone, or with five threads all at once."""
    case = make_case(
        rows=(20_000, 400, 3000), dims=(64,) * 3, num_bags=((4000,) * 4,), longest=8, weighted=weighted
    )
    case.values[: len(case.values) // 8] = 7
    results = []
    for threads in (1, 2, 5):
        set_threads(threads)
        check_update(case, ROW_WISE_ADAGRAD, make_hyper(), grad=case.gradient() / 8)
        found = updated(OPS, case, case.gradient(exact=False), ADAM, make_hyper())
        results.append(found[0] + found[1])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))
