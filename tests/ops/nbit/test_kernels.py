"""The compiled lookup of quantised rows against naive.py, and bit by bit against the same numbers in fp32."""

import pytest
import torch
from torch.testing import assert_close

from meshrec.ops import nbit, operators
from meshrec.ops.nbit import naive
from meshrec.ops.tbe.layout import MEAN, NONE, SUM

OPS = operators
NAMES = torch.tensor(list(b"t0\ta\nt1\tb\nt1\tc\nt2\td\n"), dtype=torch.uint8)
BLOCKS, VARIABLE = ((2,) * 4, (0,) * 4, (7,) * 4), ((3, 1, 0, 2), (1, 6, 4, 2))
SHAPES = {
    "one block": {},
    "weighted": {"weighted": True, "longest": 20},
    "blocks": {"num_bags": BLOCKS},
    "int32 ids": {"num_bags": BLOCKS, "id_dtype": torch.int32},
    "flat": {"num_bags": VARIABLE, "flat": True, "weighted": True},
    "sequences": {"num_bags": VARIABLE, "flat": True, "pooling": (NONE,) * 4},
    "no samples": {"num_bags": ((0,) * 4,)},
    "no ids": {"longest": 0},
}
MIXES = {"int8": (8, 8, 8), "int4": (4, 4, 4), "int2": (2, 2, 2), "mixed": (4, 0, 8)}


def quantised(case, bits):
    return [w if b == 0 else nbit.quantize(w, b) for w, b in zip(case.weights, bits, strict=True)]


def arguments(case, bits, dtype=torch.float32):
    lookups = (*case.lookups, case.dims, case.out_size, dtype, True, NAMES)
    return quantised(case, bits), list(bits), *lookups


def of_numbers(case, bits):
    """The same lookup in fp32 tables of what the rows stand for."""
    rows = quantised(case, bits)
    dims = [weight.shape[1] for weight in case.weights]
    numbers = [r if b == 0 else nbit.dequantize(r, b, d) for r, b, d in zip(rows, bits, dims, strict=True)]
    return case._replace(weights=numbers).forward(OPS)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mix", MIXES)
def test_forward(make_case, shape, mix):
    case = make_case(**SHAPES[shape])
    args = arguments(case, MIXES[mix])
    found = OPS.nbit_forward(*args)
    assert_close(found, naive.nbit_forward(*args))
    assert torch.equal(found, of_numbers(case, MIXES[mix]))


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 15, 16, 17, 31, 64, 100, 128, 300])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_every_width(make_case, width, bits):
    for options in ({}, {"weighted": True}, {"flat": True, "pooling": (NONE,) * 4}):
        case = make_case(rows=(40, 3, 20), dims=(width,) * 3, **options)
        assert torch.equal(OPS.nbit_forward(*arguments(case, (bits,) * 3)), of_numbers(case, (bits,) * 3))


def drawn(make_case, seed):
    """Tables, features, blocks and bags of any number, width, type and pooling."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, count=1):
        return torch.randint(low, high + 1, [count], generator=generator).tolist()

    num_keys, num_tables = draw(1, 4)[0], draw(1, 4)[0]
    flat, num_features, longest = draw(0, 1)[0] == 1, draw(1, 4)[0], draw(0, 12)[0]
    blocks = [draw(0, 9, num_keys if flat else 1) for _ in range(draw(1, 3)[0])]
    sequence = flat and draw(0, 2)[0] == 0
    case = make_case(
        rows=tuple(draw(1, 60, num_tables)),
        dims=tuple(draw(1, 9 if seed % 2 else 200, num_tables)),
        keys=tuple(draw(0, num_keys - 1, num_features)),
        tables=tuple(draw(0, num_tables - 1, num_features)),
        pooling=(NONE,) * num_features if sequence else tuple(draw(SUM, MEAN, num_features)),
        num_bags=tuple(tuple(b if flat else b * num_keys) for b in blocks),
        flat=flat,
        weighted=not sequence and draw(0, 1)[0] == 1,
        longest=longest,
        id_dtype=(torch.int32, torch.int64)[draw(0, 1)[0]],
        offset_dtype=(torch.int32, torch.int64)[draw(0, 1)[0]],
        seed=seed,
    )
    return case, [(0, 8, 4, 2)[which] for which in draw(0, 3, num_tables)]


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_drawn_cases(make_case, first):
    for seed in range(first, first + 20):
        case, bits = drawn(make_case, seed)
        args = arguments(case, bits)
        found = OPS.nbit_forward(*args)
        assert_close(found, naive.nbit_forward(*args))
        assert torch.equal(found, of_numbers(case, bits)), seed


def test_a_table_without_rows_refuses_every_id(one_table):
    none = [torch.empty(0, 12)]
    case = one_table([[], []], 1, 12)._replace(weights=none)
    assert OPS.nbit_forward(*arguments(case, (4,))).tolist() == [[0.0] * 12] * 2
    case = one_table([[0]], 1, 12)._replace(weights=none)
    with pytest.raises(ValueError, match=r"id 0.*\[0.*0"):
        OPS.nbit_forward(*arguments(case, (4,)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_output_is_rounded_once(make_case, dtype):
    case = make_case(longest=20)
    found = OPS.nbit_forward(*arguments(case, (8, 4, 2), dtype))
    assert torch.equal(found, OPS.nbit_forward(*arguments(case, (8, 4, 2))).to(dtype))


@pytest.mark.threads
@pytest.mark.parametrize("pooling", [SUM, MEAN])
def test_one_hot_table_over_threads(one_table, set_threads, pooling):
    bags = [[i % 30 for i in range(b % 7)] for b in range(20000)]
    case = one_table(bags, 30, 64, pooling=pooling)
    args = arguments(case, (4,))
    expected = OPS.nbit_forward(*args)
    set_threads(2)
    assert torch.equal(OPS.nbit_forward(*args), expected)
    weight = torch.randn(5000, 64)
    assert torch.equal(nbit.quantize(weight, 4), naive.nbit_quantize(weight, 4, None))


@pytest.mark.parametrize("ops", [OPS, naive], ids=["kernels", "naive"])
def test_refusals(make_case, ops):
    case = make_case(weighted=True)
    case.values[-1] = 10**5
    with pytest.raises(ValueError, match=r"'t2'.*id 100000.*'d'.*\[0.*700"):
        ops.nbit_forward(*arguments(case, (8, 8, 8)))
    case = make_case(weighted=True)
    case.sample_weights[-1] = float("nan")
    with pytest.raises(ValueError, match=r"'t2'.*NaN"):
        ops.nbit_forward(*arguments(case, (8, 8, 8)))
    weights, _, *rest = arguments(case, (8, 4, 8))
    with pytest.raises(ValueError, match=r"17 numbers.*8 bits"):
        ops.nbit_forward(weights, [8, 8, 8], *rest)
    with pytest.raises(ValueError, match=r"3 weights.*2"):
        ops.nbit_forward(weights, [8, 8], *rest)


def test_a_lookup_is_not_trained(make_case):
    case = make_case(weighted=True)
    weights = case.sample_weights.clone().requires_grad_()
    out = OPS.nbit_forward(*arguments(case._replace(sample_weights=weights), (8, 8, 8)))
    with pytest.raises(ValueError, match="quantised"):
        out.sum().backward()


RUN = """
import sys
import torch
from meshrec.ops import nbit
weights, calls = torch.load(sys.argv[1])
results = [torch.ops.meshrec.nbit_forward(*call) for call in calls]
results += [nbit.quantize(weight, bits) for weight in weights for bits in (8, 4, 2)]
torch.save(results, sys.argv[2])
"""


def test_instruction_sets_agree_bit_by_bit(run_code, make_case, tmp_path):
    cases = [
        make_case(dims=(w, w + 1, 2 * w), **SHAPES[name]) for w in (5, 32) for name in ("flat", "blocks")
    ]
    calls = [arguments(case, mix) for case in cases for mix in MIXES.values()]
    weights = [weight for case in cases for weight in case.weights]
    torch.save([weights, calls], tmp_path / "calls.pt")
    expected = [OPS.nbit_forward(*call) for call in calls]
    expected += [nbit.quantize(weight, bits) for weight in weights for bits in (8, 4, 2)]
    for isa in ("baseline", "avx2"):
        run_code(RUN, tmp_path / "calls.pt", tmp_path / f"{isa}.pt", MESHREC_ISA=isa)
        for found, wanted in zip(torch.load(tmp_path / f"{isa}.pt"), expected, strict=True):
            assert_close(found, wanted, rtol=1e-6, atol=1e-6)
