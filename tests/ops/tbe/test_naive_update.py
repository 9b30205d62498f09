import math

import pytest
import torch

from meshrec.ops.tbe.formulas import FORMULAS, HYPER_SIZE, Hyper, OptimizerKind, formula_of
from meshrec.ops.tbe.naive_update import random_bits, stochastic_round, update_rows

FTRL = OptimizerKind.FTRL.code
ADAGRAD = OptimizerKind.ADAGRAD.code
ADAM = OptimizerKind.ADAM.code
LAMB = OptimizerKind.LAMB.code
LARS = OptimizerKind.LARS.code
PARTIAL_ROW_WISE_ADAM = OptimizerKind.PARTIAL_ROW_WISE_ADAM.code
PARTIAL_ROW_WISE_LAMB = OptimizerKind.PARTIAL_ROW_WISE_LAMB.code
RMSPROP_AR = OptimizerKind.ROW_WISE_RMSPROP_AR.code
ROW_WISE_ADAGRAD = OptimizerKind.ROW_WISE_ADAGRAD.code
SGD = OptimizerKind.SGD.code

LR, EPS, DECAY, B1, B2, MOMENTUM, TRUST = 0.05, 1e-3, 0.1, 0.8, 0.95, 0.7, 0.02
BETA, L1, L2_PROXIMAL = 0.3, 0.5, 0.2
AR_ALPHA, MIN_SHRINKAGE = 9.0, 0.3
NONE, L2, DECOUPLED = range(3)
PER_ROW = "row"
PER_ELEMENT = "element"
SLOTS = {
    formula.code: [PER_ROW if slot.per_row else PER_ELEMENT for slot in formula.slots] for formula in FORMULAS
}


def make_hyper(*, mode=NONE, step=1, seed=0, decay=DECAY, lr=LR, row_dim=0):
    return Hyper(
        lr=lr,
        eps=EPS,
        weight_decay=decay,
        decay_mode=mode,
        beta1=B1,
        beta2=B2,
        momentum=MOMENTUM,
        trust_coefficient=TRUST,
        beta=BETA,
        l1=L1,
        l2=L2_PROXIMAL,
        ar_alpha=AR_ALPHA,
        min_shrinkage=MIN_SHRINKAGE,
        step=step,
        seed=seed,
        row_dim=row_dim,
    )


def make_state(optimizer, num_rows, dim):
    return [
        torch.zeros(num_rows, dim) if slot == PER_ELEMENT else torch.zeros(num_rows)
        for slot in SLOTS[optimizer]
    ]


def norm(x):
    return math.sqrt(sum(value * value for value in x))


def written_out(optimizer, w, g, slots, mode, t):
    """One row in plain Python floats; ``slots`` are lists (per element) or one-element lists (per row)."""
    dim = len(w)
    old = list(w)
    if optimizer == LARS:
        decay = DECAY if mode == L2 else 0.0
        w_norm, g_norm = norm(old), norm(g)
        local = LR if w_norm == 0 or g_norm == 0 else LR * TRUST * w_norm / (g_norm + decay * w_norm + EPS)
        for i in range(dim):
            slots[0][i] = MOMENTUM * slots[0][i] + local * (g[i] + decay * old[i])
            w[i] = (old[i] * (1 - LR * DECAY) if mode == DECOUPLED else old[i]) - slots[0][i]
        return
    lamb = optimizer in (LAMB, PARTIAL_ROW_WISE_LAMB)
    if mode == L2:
        g = [g[i] + DECAY * old[i] for i in range(dim)]
    if optimizer == FTRL:
        for i in range(dim):
            before, slots[0][i] = math.sqrt(slots[0][i]), slots[0][i] + g[i] * g[i]
            root = math.sqrt(slots[0][i])
            slots[1][i] += g[i] - (root - before) / LR * old[i]
            over = max(abs(slots[1][i]) - L1, 0.0)
            w[i] = -math.copysign(over, slots[1][i]) / ((BETA + root) / LR + L2_PROXIMAL)
        return
    if mode == DECOUPLED and not lamb:
        for i in range(dim):
            w[i] = old[i] * (1 - LR * DECAY)
    mean_square = sum(x * x for x in g) / dim
    if optimizer == RMSPROP_AR:
        slots[0][0] = B2 * slots[0][0] + (1 - B2) * mean_square
        gap = t - slots[1][0] if slots[1][0] else 1
        slots[1][0] = float(t)
        for i in range(dim):
            w[i] *= max(MIN_SHRINKAGE, 1 - LR * AR_ALPHA * gap)
            w[i] -= LR * g[i] / (math.sqrt(slots[0][0]) + EPS)
        return
    r = [0.0] * dim
    for i in range(dim):
        if optimizer == SGD:
            w[i] -= LR * g[i]
        elif optimizer == ADAGRAD:
            slots[0][i] += g[i] * g[i]
            w[i] -= LR * g[i] / (math.sqrt(slots[0][i]) + EPS)
        elif optimizer == ROW_WISE_ADAGRAD:
            slots[0][0] += mean_square / dim  # in dim equal parts; read only after the loop
        else:
            slots[0][i] = B1 * slots[0][i] + (1 - B1) * g[i]
            per_row = len(slots[1]) == 1
            at = 0 if per_row else i
            if not per_row or i == 0:
                slots[1][at] = B2 * slots[1][at] + (1 - B2) * (mean_square if per_row else g[i] * g[i])
            r[i] = slots[0][i] / (1 - B1**t) / (math.sqrt(slots[1][at] / (1 - B2**t)) + EPS)
            if not lamb:
                w[i] -= LR * r[i]
    if optimizer == ROW_WISE_ADAGRAD:
        for i in range(dim):
            w[i] -= LR * g[i] / (math.sqrt(slots[0][0]) + EPS)
    if lamb:
        if mode == DECOUPLED:
            r = [r[i] + DECAY * old[i] for i in range(dim)]
        ratio = 1.0 if norm(old) == 0 or norm(r) == 0 else norm(old) / norm(r)
        for i in range(dim):
            w[i] = old[i] - LR * ratio * r[i]


@pytest.mark.parametrize("mode", [NONE, L2, DECOUPLED])
@pytest.mark.parametrize("optimizer", SLOTS)
def test_formula_matches_a_written_out_loop(optimizer, mode):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 3, generator=generator)
    weight[4] = 0
    state = make_state(optimizer, 5, 3)
    untouched = weight[2].clone()
    rows = torch.tensor([0, 1, 3, 4])
    expected = {int(row): weight[row].double().tolist() for row in rows}
    slots = {row: [s[row].double().view(-1).tolist() for s in state] for row in expected}
    for step in (1, 2, 5):
        gradient = torch.randn(4, 3, generator=generator)
        gradient[1] = 0
        update_rows(weight, state, rows, gradient, None, optimizer, make_hyper(mode=mode, step=step))
        for row, g in zip(expected, gradient.double().tolist(), strict=True):
            written_out(optimizer, expected[row], g, slots[row], mode, step)
        for row, numbers in expected.items():
            torch.testing.assert_close(weight[row], torch.tensor(numbers), rtol=2e-5, atol=1e-6)
            for slot, values in zip(state, slots[row], strict=True):
                torch.testing.assert_close(slot[row].view(-1), torch.tensor(values), rtol=2e-5, atol=1e-7)
    assert torch.equal(weight[2], untouched)
    assert all(bool((slot[2] == 0).all()) for slot in state)


@pytest.mark.parametrize(
    ("optimizer", "mode", "make"),
    [
        (SGD, NONE, lambda p: torch.optim.SGD(p, lr=LR)),
        (SGD, L2, lambda p: torch.optim.SGD(p, lr=LR, weight_decay=DECAY)),
        (
            ADAGRAD,
            L2,
            lambda p: torch.optim.Adagrad(p, lr=LR, eps=EPS, weight_decay=DECAY),
        ),
        (ADAM, L2, lambda p: torch.optim.Adam(p, LR, (B1, B2), EPS, DECAY)),
        (ADAM, DECOUPLED, lambda p: torch.optim.AdamW(p, LR, (B1, B2), EPS, DECAY)),
    ],
)
def test_equals_torch_when_all_rows_are_touched(optimizer, mode, make):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 4, generator=generator)
    parameter = torch.nn.Parameter(weight.clone())
    torch_optimizer = make([parameter])
    state = make_state(optimizer, 6, 4)
    for step in range(1, 6):
        gradient = torch.randn(6, 4, generator=generator)
        parameter.grad = gradient.clone()
        torch_optimizer.step()
        update_rows(
            weight, state, torch.arange(6), gradient, None, optimizer, make_hyper(mode=mode, step=step)
        )
    torch.testing.assert_close(weight, parameter.detach())


@pytest.mark.parametrize("mode", [NONE, L2, DECOUPLED])
@pytest.mark.parametrize("optimizer", [LARS, LAMB, PARTIAL_ROW_WISE_ADAM])
def test_statistics_of_the_row_itself_change_nothing(optimizer, mode):
    generator = torch.Generator().manual_seed(0)
    weight, gradient = torch.randn(3, 4, generator=generator), torch.randn(3, 4, generator=generator)
    h = make_hyper(mode=mode, row_dim=4)
    squared = gradient + DECAY * weight if mode == L2 and optimizer != LARS else gradient
    # At step 1 both corrected moments are the gradient's own.
    r = squared / (squared.abs() + EPS) + (DECAY * weight if mode == DECOUPLED else 0)
    stats = torch.stack([x.square().sum(1) for x in (squared, weight, r)], 1)
    results = []
    for given in (None, stats):
        changed = weight.clone()
        update_rows(changed, make_state(optimizer, 3, 4), torch.arange(3), gradient, given, optimizer, h)
        results.append(changed)
    torch.testing.assert_close(results[1], results[0])


def splitmix(row, column, seed, step):
    mask = (1 << 64) - 1
    x = row * 0x9E3779B97F4A7C15 + column * 0xC2B2AE3D27D4EB4F
    x = (x + seed * 0x165667B19E3779F9 + step * 0x27D4EB2F165667C5) & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return (x ^ x >> 31) & 0xFFFF


def test_random_bits_match_unsigned_arithmetic():
    rows = torch.tensor([0, 1, 812, 2**31 + 7])
    found = random_bits(rows, torch.arange(3), 2**52 + 1, 1000)
    expected = [[splitmix(row, column, 2**52 + 1, 1000) for column in range(3)] for row in rows.tolist()]
    assert found.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stochastic_rounding_has_the_right_mean(dtype):
    x = torch.tensor([1.0001, -3.7, 100.123, -2.0e-3])
    bits = random_bits(torch.arange(40_000), torch.arange(4), seed=3, step=1)
    rounded = stochastic_round(x.expand(40_000, 4), dtype, bits)
    for column, value in enumerate(x):
        near = value.to(dtype)
        choices = rounded[:, column].unique()
        assert len(choices) == 2
        assert near in choices
        gap = float((choices[1].double() - choices[0].double()).abs())
        assert abs(float(rounded[:, column].double().mean()) - float(value)) < 0.02 * gap


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stochastic_rounding_keeps_what_the_dtype_holds(dtype):
    exact = torch.tensor([0.0, -0.0, 1.5, -(2.0**-14), 65280.0, float("inf"), -float("inf")])
    all_bits = torch.full(exact.shape, 0xFFFF)
    assert torch.equal(stochastic_round(exact, dtype, all_bits), exact.to(dtype))
    assert stochastic_round(torch.tensor([float("nan")]), dtype, torch.tensor([0xFFFF])).isnan().all()


def test_fp16_subnormals_and_overflow_round_to_nearest():
    x = torch.tensor([2.0**-15 * 1.0001, 1e-9, 65510.0, 70000.0])
    for bits in (0, 0xFFFF):
        assert torch.equal(stochastic_round(x, torch.float16, torch.full(x.shape, bits)), x.half())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_seed_zero_rounds_to_nearest_and_other_seeds_do_not(dtype):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(50, 8, generator=generator).to(dtype)
    gradient = torch.randn(50, 8, generator=generator)
    exact = start.float() - LR * gradient
    results = {}
    for seed in (0, 7, 8):
        weight = start.clone()
        update_rows(weight, [], torch.arange(50), gradient, None, SGD, make_hyper(seed=seed))
        results[seed] = weight
    assert torch.equal(results[0], exact.to(dtype))
    assert torch.equal(
        results[7], stochastic_round(exact, dtype, random_bits(torch.arange(50), torch.arange(8), 7, 1))
    )
    assert not torch.equal(results[7], results[8])


def test_unknown_code_and_bad_hyper():
    with pytest.raises(ValueError, match=r"optimizer 99 is unknown; codes 0 to \d+ exist"):
        formula_of(99)
    with pytest.raises(ValueError, match=r"float64.*torch\.float32"):
        Hyper.from_tensor(torch.zeros(HYPER_SIZE))


def test_hyper_reads_its_fields_in_order():
    assert Hyper.from_tensor(torch.arange(HYPER_SIZE, dtype=torch.float64)) == Hyper(*range(HYPER_SIZE))
    assert Hyper.from_tensor(Hyper(lr=0.5, step=3).as_tensor()) == Hyper(lr=0.5, step=3)
