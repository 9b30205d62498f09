"""Embedding collections under torch.compile and torch.export."""

import pytest
import torch

from meshrec import fuse
from meshrec.optim import RowWiseAdagrad

from .models import BATCH, NAMES, gradients, make_bags, make_input, make_sequences, same_weights, trained


@pytest.fixture(autouse=True)
def no_compiled_programs():
    """torch.compile gives up on a function after some compilations; all tests compile one forward."""
    torch.compiler.reset()


@pytest.mark.parametrize("weighted", [False, True])
def test_bags_compile_without_a_graph_break(weighted):
    ebc = make_bags(is_weighted=weighted)
    compiled = torch.compile(ebc, fullgraph=True, backend="aot_eager")
    grad = torch.randn(BATCH, 63)
    for seed in range(2):
        features = make_input(weighted=weighted, seed=seed)
        eager, traced = ebc(features).values(), compiled(features).values()
        assert torch.equal(traced, eager)
        ours = gradients(ebc, (eager * grad).sum())
        for one, other in zip(ours, gradients(ebc, (traced * grad).sum()), strict=True):
            assert torch.equal(one, other)


def test_sequences_compile_without_a_graph_break():
    ec = make_sequences()
    compiled = torch.compile(ec, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        features = make_input(seed=seed)
        eager, traced = ec(features), compiled(features)
        for name in NAMES:
            assert torch.equal(traced[name].values(), eager[name].values())
            assert torch.equal(traced[name].lengths(), eager[name].lengths())


@pytest.mark.parametrize("make", [make_bags, make_sequences])
def test_export_serves_other_batches(make):
    module = make()
    batch, ids = torch.export.Dim("batch", min=2), torch.export.Dim("ids", min=2)
    features = make_input(batch=6)
    # The leaves: values, weights, lengths, offsets, strides, inverse indices.
    shapes = ([{0: ids}, None, {0: 3 * batch}, None, None, None],)
    exported = torch.export.export(module, (features,), dynamic_shapes=shapes).module()
    other = make_input(batch=4, seed=3)
    ours, expected = exported(other), module(other)
    if make is make_bags:
        assert torch.equal(ours.values(), expected.values())
    else:
        assert all(torch.equal(ours[name].values(), expected[name].values()) for name in NAMES)


# torch means to hide this warning of its own, but cannot where warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("make", [make_bags, make_sequences])
def test_compiled_fused_modules_train_as_eager_ones(make):
    eager, traced = (fuse(make(), optimizer=RowWiseAdagrad(lr=0.1)) for _ in range(2))
    trained(eager)
    trained(traced, forward=torch.compile(traced, backend="aot_eager"))
    assert same_weights(eager, traced)
    assert not same_weights(eager, make())
