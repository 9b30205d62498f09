"""The compiled lookups against naive.py: outputs, sample-weight gradients, threads, instruction sets.

Updates and weight gradients are in test_kernels_update.py, refusals in test_kernels_errors.py.
"""

import copy

import pytest
import torch
from torch.nn.functional import embedding_bag
from torch.testing import assert_close

from meshrec.ops import operators
from meshrec.ops.tbe import naive
from meshrec.ops.tbe.formulas import FORMULAS, Hyper
from meshrec.ops.tbe.layout import MEAN, NONE, SUM

OPS = operators
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WIDTHS = [1, 3, 4, 8, 17, 31, 64, 100, 128, 300, 2100]
ONE_BLOCK, BLOCKS, VARIABLE = ((5,) * 4,), ((2,) * 4, (0,) * 4, (7,) * 4), ((3, 1, 0, 2), (1, 6, 4, 2))
SHAPES = {
    "one block": {"num_bags": ONE_BLOCK},
    "blocks": {"num_bags": BLOCKS},
    "one block, flat": {"num_bags": ONE_BLOCK, "flat": True},
    "blocks of any size, flat": {"num_bags": VARIABLE, "flat": True},
    "sequences": {"num_bags": VARIABLE, "flat": True, "pooling": (NONE,) * 4},
    "no samples": {"num_bags": ((0,) * 4,)},
    "no ids": {"num_bags": ONE_BLOCK, "longest": 0},
}


@pytest.fixture(params=SHAPES)
def shape(request):
    return SHAPES[request.param]


def weightings(shape):
    return [False] if NONE in shape.get("pooling", ()) else [False, True]


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_equals_naive(make_case, shape, dtype):
    for weighted in weightings(shape):
        case = make_case(**shape, weighted=weighted, dtype=dtype)
        assert_close(case.forward(OPS), case.forward(naive))


@pytest.mark.parametrize("offset_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_integer_types_do_not_show(make_case, shape, id_dtype, offset_dtype):
    expected = make_case(**shape)
    case = make_case(**shape, id_dtype=id_dtype, offset_dtype=offset_dtype)
    assert (case.values.dtype, case.offsets.dtype) == (id_dtype, offset_dtype)
    assert torch.equal(case.forward(OPS), expected.forward(OPS))
    for weighted in weightings(shape):
        case = make_case(**shape, id_dtype=id_dtype, offset_dtype=offset_dtype, weighted=weighted)
        grad = case.gradient()
        assert_close(case.dense_grad(OPS, grad), case.dense_grad(naive, grad))
        if weighted:
            assert_close(case.sample_weight_grad(OPS, grad), case.sample_weight_grad(naive, grad))


@pytest.mark.parametrize("width", WIDTHS)
def test_every_width(make_case, width):
    options = {"rows": (40, 3, 20), "dims": (width,) * 3, "id_dtype": torch.int32}
    for dtype in DTYPES:
        for weighted in (False, True):
            case = make_case(**options, dtype=dtype, weighted=weighted)
            assert_close(case.forward(OPS), case.forward(naive))
            grad = case.gradient()
            assert_close(case.sample_weight_grad(OPS, grad), case.sample_weight_grad(naive, grad))
        case = make_case(**options, dtype=dtype, flat=True, pooling=(NONE,) * 4)
        assert torch.equal(case.forward(OPS), case.forward(naive))


@pytest.mark.parametrize("width", WIDTHS)
def test_sums_are_those_of_embedding_bag_bit_for_bit(one_table, width):
    generator = torch.Generator().manual_seed(width)
    bags = [torch.randint(0, 30, [n], generator=generator).tolist() for n in (0, 1, 2, 50, 7, 0, 300)]
    case = one_table(bags, 30, width)
    expected = embedding_bag(case.values, case.weights[0], case.offsets, mode="sum", include_last_offset=True)
    assert torch.equal(case.forward(OPS), expected)


LAST = 29
BAGS = {
    "one id": [[3]],
    "one id among empty bags": [[], [3], []],
    "rows at both ends": [[0, LAST], [LAST], [0]],
    "repeated ids": [[2, 2, 2], [2, 7, 2], [7]],
    "one huge bag": [[], [i % 30 for i in range(5000)], [1]],
    "one hot row": [[7] * 3000, [7], [7] * 2000],
    "a hot row in many bags": [[7]] * 6000,
}


@pytest.fixture(params=BAGS)
def bags(request):
    return BAGS[request.param]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", [SUM, MEAN])
def test_odd_bags(one_table, bags, pooling, weighted):
    case = one_table(bags, LAST + 1, 12, pooling=pooling, weighted=weighted)
    assert_close(case.forward(OPS), case.forward(naive), rtol=1e-5, atol=1e-4)
    grad = case.gradient()
    assert_close(case.sample_weight_grad(OPS, grad), case.sample_weight_grad(naive, grad))


def test_odd_sequences(one_table, bags):
    case = one_table(bags, LAST + 1, 12, pooling=NONE, flat=True)
    assert torch.equal(case.forward(OPS), case.forward(naive))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_output_is_rounded_once(make_case, dtype):
    case = make_case(dtype=(torch.float32, torch.float16, torch.bfloat16), longest=20)
    out = case.forward(OPS, out_dtype=dtype)
    assert out.dtype == dtype
    assert torch.equal(out, case.forward(OPS).to(dtype))


def strided(tensor):
    return tensor.repeat_interleave(2, -1)[..., ::2]


def test_inputs_need_not_be_contiguous(make_case):
    case = make_case(weighted=True)
    expected, grad = case.forward(OPS), case.gradient()
    by_weight = case.sample_weight_grad(OPS, grad)
    assert case.sample_weights is not None
    spread = case._replace(
        weights=[strided(weight) for weight in case.weights],
        values=strided(case.values),
        offsets=strided(case.offsets),
        sample_weights=strided(case.sample_weights),
    )
    assert not spread.weights[0].is_contiguous()
    assert torch.equal(spread.forward(OPS), expected)
    assert torch.equal(spread.sample_weight_grad(OPS, grad), by_weight)


@pytest.mark.parametrize("make_grad", [lambda grad: strided(grad), lambda grad: grad.T.contiguous().T])
def test_gradients_need_not_be_contiguous(make_case, make_grad):
    case = make_case(weighted=True)
    grad = case.gradient()
    assert not make_grad(grad).is_contiguous()
    found, expected = case.sample_weight_grad(OPS, make_grad(grad)), case.sample_weight_grad(OPS, grad)
    assert torch.equal(found, expected)


def test_a_skipped_feature_gives_the_sample_weights_no_gradient(make_case):
    case = make_case(num_bags=BLOCKS, weighted=True)._replace(tables=[-1, 1, 1, -1])
    grad = case.gradient()
    found = case.sample_weight_grad(OPS, grad)
    assert_close(found, case.sample_weight_grad(naive, grad))
    first, last = case.offsets[BLOCKS[0][0] * 3], case.offsets[BLOCKS[0][0] * 4]
    assert not found[first:last].any()  # key 3 of the first block


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_bags", [ONE_BLOCK, BLOCKS, VARIABLE])
def test_clamp_ids_equals_naive(make_case, num_bags, id_dtype):
    case = make_case(num_bags=num_bags, id_dtype=id_dtype)
    noise = torch.arange(case.values.numel())
    wild = torch.where(noise % 3 == 0, noise * 100 - 500, case.values.long()).to(id_dtype)
    case = case._replace(values=wild, tables=[0, 1, 1, -1])
    kept = case.values.clone()
    (found, counts), (expected, expected_counts) = case.clamp_ids(OPS), case.clamp_ids(naive)
    assert torch.equal(found, expected)
    assert torch.equal(counts, expected_counts)
    assert counts.any()
    assert torch.equal(case.values, kept)


@pytest.mark.threads
@pytest.mark.parametrize("weighted", [False, True])
def test_threads_do_not_show_in_the_output(make_case, set_threads, weighted):
    """Big enough that the bags of one feature are cut into pieces."""
    case = make_case(num_bags=((3000,) * 4, (999,) * 4), weighted=weighted)
    grad = case.gradient(exact=False)
    results = []
    for threads in (1, 2, 5):
        set_threads(threads)
        results.append([case.forward(OPS), case.sample_weight_grad(OPS, grad)])
    assert_close(results[0][0], case.forward(naive), rtol=1e-5, atol=1e-5)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


def every_half():
    """All numbers of fp16: zeros, subnormals, normals, infinities; of the NaNs one."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.float16)
    return torch.where(values.isnan(), torch.tensor(float("nan"), dtype=torch.float16), values)


def every_rounding():
    """fp32 numbers at, between and next to the numbers of fp16, and beyond the largest."""
    halves = every_half()
    halves = halves[halves.isfinite()].float().sort().values
    middles = (halves[1:] + halves[:-1]) / 2
    beside = [middles.nextafter(torch.tensor(float(to))) for to in ("inf", "-inf")]
    rest = torch.tensor([65519.996, 65520.0, 1e9, -1e9, 1e-30, float("inf"), float("-inf"), float("nan")])
    return torch.cat([halves, middles, *beside, rest])


def same_bits(found, expected):
    assert_close(found.flatten(), expected.flatten(), rtol=0, atol=0, equal_nan=True)


RUN_CALLS = """
import sys
import torch
import meshrec.ops.tbe.naive
calls = torch.load(sys.argv[1])
results = {kind: [getattr(torch.ops.meshrec, name)(*args) for name, args in calls[kind]] for kind in calls}
torch.save([results, calls], sys.argv[2])
"""


def run_with(run_code, isa, calls, folder):
    """What calls give, and their arguments afterwards, in a process that uses one instruction set."""
    torch.save(calls, folder / "calls.pt")
    run_code(RUN_CALLS, folder / "calls.pt", folder / f"{isa}.pt", MESHREC_ISA=isa)
    return torch.load(folder / f"{isa}.pt")


def forward_call(case):
    names = torch.tensor(list(b"table\tfeature\n" * len(case.keys)), dtype=torch.uint8)
    return "tbe_forward", (case.weights, *case.lookups, case.out_size, torch.float32, True, names)


def update_call(case, grad, state, optimizer, hyper):
    args = (grad, *case.lookups, case.dims, case.copied().weights, state, optimizer, hyper, None, [])
    return "tbe_update", args


WEIGHTS, STATE = 11, 12  # places in the arguments of tbe_update


@pytest.fixture(scope="module")
def calls(make_case, one_table):
    """Lookups and updates that together run every inner loop, and every conversion of fp16."""
    options = {"num_bags": BLOCKS, "longest": 30, "dims": (4, 31, 100)}
    cases = [make_case(**options, dtype=dtype) for dtype in DTYPES]
    # 27 MB, written past the caches of most machines; not all of its columns can be.
    large = make_case(num_bags=((70_000,) * 4,), longest=2, dims=(16, 8, 64))
    weighted = make_case(**options, weighted=True)
    values, offsets, _, *rest = weighted.lookups
    by_weight = (weighted.gradient(), weighted.weights, values, offsets, *rest, weighted.dims)
    row = one_table([[0]], 1, 1 << 16, pooling=NONE, flat=True)
    hyper = Hyper(lr=0.1, eps=1e-3, weight_decay=0.1, decay_mode=1, beta1=0.8, beta2=0.95, seed=5).as_tensor()
    updates = []
    for case in cases:
        for formula in FORMULAS:
            slots = [2 - slot.per_row for slot in formula.slots]
            state = [weight.abs().float() for weight in case.weights]
            state = [s.clone() if dims == 2 else s[:, 0].clone() for dims in slots for s in state]
            updates.append(update_call(case, case.gradient(), state, formula.code, hyper))
    numbers = every_rounding()
    zeros = one_table([[0]], 1, len(numbers))
    zeros = zeros._replace(weights=[torch.zeros(1, len(numbers), dtype=torch.float16)])
    minus_one = Hyper(lr=-1).as_tensor()
    return {
        "exact": [forward_call(case) for case in [*cases, large]],
        "close": [forward_call(weighted), ("tbe_sample_weight_grad", by_weight)],
        "read every fp16": [forward_call(row._replace(weights=[every_half()[None]]))],
        "update": updates,
        "round to fp16": [update_call(zeros, numbers[None], [], 0, minus_one)],
    }


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_instruction_sets_agree(run_code, calls, tmp_path, isa):
    """A machine that lacks the instruction set takes the next lower one."""
    results, calls_after = run_with(run_code, isa, calls, tmp_path)
    calls = copy.deepcopy(calls)
    expected = {kind: [getattr(naive, name)(*args) for name, args in calls[kind]] for kind in calls}
    here = [getattr(OPS, name)(*args) for name, args in calls["exact"]]
    assert all(torch.equal(a, b) for a, b in zip(results["exact"], here, strict=True))
    assert_close(results["exact"], expected["exact"])
    assert_close(results["close"], expected["close"])
    same_bits(results["read every fp16"][0], every_half().float())
    for (_, found), (_, wanted) in zip(calls_after["update"], calls["update"], strict=True):
        assert_close(found[WEIGHTS], wanted[WEIGHTS])
        assert_close(found[STATE], wanted[STATE])
    # 0 - (-1) * g, to nearest, ties to even
    same_bits(calls_after["round to fp16"][0][1][WEIGHTS][0][0], every_rounding().half())
