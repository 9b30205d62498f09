import pytest
import torch
from torch.library import opcheck

import meshrec.ops.tbe.naive  # noqa: F401 - registers what is tested here
from meshrec.ops import operators
from meshrec.ops.tbe.formulas import Hyper

ROWS, DIMS = [10, 7], [3, 5]
LOOKUPS = (2, [0, 1, 1], [0, 1, 0])  # num_keys, keys, tables
POOLED = ([0, 1, 0], False)
SEQUENCE = ([2, 2, 2], True)
FEATURE_DIMS = [3, 5, 3]
NAMES = torch.tensor(list(b"t0\ta\nt1\tb\nt0\tb\n"), dtype=torch.uint8)
OPS, REGISTERED = operators, torch.ops.meshrec


def make_inputs(*, weighted=True, id_dtype=torch.int64, requires_grad=False):
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(e, d, generator=generator).requires_grad_(requires_grad)
        for e, d in zip(ROWS, DIMS, strict=True)
    ]
    offsets = torch.tensor([0, 2, 2, 5, 6, 10, 10], dtype=id_dtype)
    values = torch.randint(0, 7, (10,), generator=generator, dtype=id_dtype)
    sample_weights = torch.rand(10, generator=generator).requires_grad_(requires_grad) if weighted else None
    return weights, values, offsets, sample_weights


def forward_args(inputs, mode=POOLED):
    out_size = 5 * 3 + 5 * 5 + 5 * 3 if mode[1] else 3
    return (*inputs, None, *LOOKUPS, *mode, out_size, torch.float32, True, NAMES)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch 2.15's own opcheck
@pytest.mark.parametrize(("mode", "weighted"), [(POOLED, True), (POOLED, False), (SEQUENCE, False)])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_opcheck_forward(mode, weighted, id_dtype):
    inputs = make_inputs(weighted=weighted, id_dtype=id_dtype, requires_grad=True)
    opcheck(REGISTERED.tbe_forward.default, forward_args(inputs, mode))


@pytest.mark.parametrize(("optimizer", "slots"), [(0, 0), (2, 1)])
def test_opcheck_update(optimizer, slots):
    weights, values, offsets, sample_weights = make_inputs()
    hyper = Hyper(lr=0.1, eps=1e-8).as_tensor()
    state = [torch.zeros(rows) for rows in ROWS] * slots
    layout = (None, *LOOKUPS, *POOLED, FEATURE_DIMS)
    args = (
        torch.ones(3, 11),
        values,
        offsets,
        sample_weights,
        *layout,
        weights,
        state,
        optimizer,
        hyper,
        None,
        [],
    )
    opcheck(REGISTERED.tbe_update.default, args)


def test_opcheck_gradients():
    weights, values, offsets, sample_weights = make_inputs()
    grad, layout = torch.ones(3, 11), (None, *LOOKUPS, *POOLED, FEATURE_DIMS)
    opcheck(
        REGISTERED.tbe_sparse_grad.default,
        (grad, values, offsets, sample_weights, *layout, [*ROWS, 4]),
    )
    opcheck(
        REGISTERED.tbe_row_squares.default,
        (grad, values, offsets, sample_weights, *layout, [*ROWS, 4]),
    )
    opcheck(REGISTERED.tbe_dense_grad.default, (grad, weights, values, offsets, sample_weights, *layout))
    opcheck(REGISTERED.tbe_sample_weight_grad.default, (grad, weights, values, offsets, *layout))


def test_opcheck_clamp_ids():
    _, values, offsets, _ = make_inputs()
    opcheck(REGISTERED.clamp_ids.default, (values, offsets, None, *LOOKUPS, [5, 4]))


@pytest.mark.parametrize(("mode", "weighted"), [(POOLED, True), (SEQUENCE, False)])
def test_backward_gives_dense_and_sample_weight_gradients(mode, weighted):
    inputs = make_inputs(weighted=weighted, requires_grad=True)
    weights, values, offsets, sample_weights = inputs
    out = OPS.tbe_forward(*forward_args(inputs, mode))
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(grad)
    with torch.no_grad():
        layout = (None, *LOOKUPS, *mode, FEATURE_DIMS)
        dense = OPS.tbe_dense_grad(grad, weights, values, offsets, sample_weights, *layout)
    assert all(torch.equal(weight.grad, expected) for weight, expected in zip(weights, dense, strict=True))
    if weighted:
        by_weight = OPS.tbe_sample_weight_grad(grad, weights, values, offsets, *layout)
        assert torch.equal(sample_weights.grad, by_weight)


def test_frozen_tables_get_no_gradient():
    inputs = make_inputs(weighted=False, requires_grad=True)
    inputs[0][0].requires_grad_(False)
    OPS.tbe_forward(*forward_args(inputs)).sum().backward()
    assert inputs[0][0].grad is None
    assert inputs[0][1].grad is not None


def test_compiles_as_one_graph():
    inputs = make_inputs(requires_grad=True)

    def loss(weights, values, offsets, sample_weights):
        return OPS.tbe_forward(*forward_args((weights, values, offsets, sample_weights))).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    gradients = torch.autograd.grad(compiled(*inputs), [*inputs[0], inputs[3]])
    expected = torch.autograd.grad(loss(*inputs), [*inputs[0], inputs[3]])
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


class Lookup(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(make_inputs()[0])
        self.register_buffer("names", NAMES)

    def forward(self, values, offsets):
        num_bags = (offsets.shape[0] - 1) // 2
        args = (list(self.weights), values, offsets, None, None, *LOOKUPS, *POOLED)
        return OPS.tbe_forward(*args, num_bags, torch.float32, True, self.names)


def test_exports_with_a_dynamic_number_of_ids():
    module = Lookup()
    _, values, offsets, _ = make_inputs()
    exported = torch.export.export(
        module, (values, offsets), dynamic_shapes=({0: torch.export.Dim("ids")}, None)
    )
    for count in (10, 6):
        args = values[:count], offsets.clamp(max=count)
        assert torch.equal(exported.module()(*args), module(*args))
