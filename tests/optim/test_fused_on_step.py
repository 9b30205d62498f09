"""The deferred mode of the fused optimizer, with what it makes possible."""

import copy

import pytest
import torch

from meshrec import DataType, EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, fuse
from meshrec.compat.bridge.warmup import WarmupOptimizer
from meshrec.optim import (
    SGD,
    Adam,
    CombinedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
    RowWiseAdagrad,
)

TABLES = {"t0": (12, 4, ["a", "b"]), "t1": (7, 4, ["b"])}
WIDTH = 12


class Model(torch.nn.Module):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features)
                for name, (rows, dim, features) in TABLES.items()
            ]
        )
        self.dense = torch.nn.Linear(WIDTH, 1)

    def forward(self, features):
        return self.dense(self.ebc(features).values()).tanh().sum()


def make_input(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (12,), generator=generator)
    values = torch.randint(0, 7, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(["a", "b"], values, lengths=lengths)


def combined(model, spec, dense_factory, update="on_step"):
    """The optimizer of a model: its tables fused, the rest dense."""
    fuse(model.ebc, optimizer=spec, update=update)
    dense = KeyedOptimizerWrapper(dict(model.dense.named_parameters()), dense_factory)
    return CombinedOptimizer([("ebc", model.ebc.fused_optimizer), ("dense", dense)])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def weights_of(model):
    return [weight.detach().clone() for weight in model.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def close(one, other):
    for a, b in zip(weights_of(one), weights_of(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", [SGD(lr=0.1), RowWiseAdagrad(lr=0.1), Adam(lr=0.1, weight_decay=0.1)])
def test_with_one_backward_per_step_it_equals_the_update_in_backward(spec):
    models = {update: Model() for update in ("in_backward", "on_step")}
    for update, model in models.items():
        optimizer = combined(model, spec, sgd, update)
        for seed in range(4):
            optimizer.zero_grad()
            model(make_input(seed)).backward()
            optimizer.step()
    close(*models.values())


def test_nothing_changes_before_the_step():
    model = Model()
    optimizer = combined(model, SGD(lr=0.1), sgd)
    before = weights_of(model)
    model(make_input(0)).backward()
    assert same(before, weights_of(model))
    assert all(weight.grad.is_sparse for weight in model.ebc.parameters())
    optimizer.step()
    assert not same(before, weights_of(model))


@pytest.mark.parametrize("spec", [SGD(lr=0.1), RowWiseAdagrad(lr=0.1)])
def test_accumulated_gradients_are_those_of_the_summed_loss(spec):
    accumulated, summed = Model(), Model()
    optimizers = [combined(model, spec, sgd) for model in (accumulated, summed)]
    for step in range(3):
        seeds = (2 * step, 2 * step + 1)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for seed in seeds:
            accumulated(make_input(seed)).backward()
        sum(summed(make_input(seed)) for seed in seeds).backward()
        for optimizer in optimizers:
            optimizer.step()
    close(accumulated, summed)
    steps = [slots["step"] for slots in accumulated.ebc.fused_optimizer.state.values()]
    assert steps == [3, 3]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, "inf"])
def test_the_norm_is_that_of_tables_and_dense_parameters_together(norm_type):
    model, plain = Model(), Model()
    optimizer = GradientClippingOptimizer(
        combined(model, SGD(lr=0.1), sgd), GradientClipping.NORM, 0.05, norm_type
    )
    dense = sgd(plain.parameters())
    for step in range(3):
        optimizer.zero_grad()
        dense.zero_grad()
        for seed in (2 * step, 2 * step + 1):
            model(make_input(seed)).backward()
            plain(make_input(seed)).backward()
        optimizer.step()
        total = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05, float(norm_type))
        dense.step()
        assert total > 0.05
        torch.testing.assert_close(optimizer.last_total_grad_norm, total)
    close(model, plain)


def state_of(optimizer):
    return copy.deepcopy(optimizer.state_dict()["state"])


def test_a_grad_scaler_trains_and_skips_steps_with_inf():
    scaled, plain = Model(), Model()
    optimizers = [combined(model, Adam(lr=0.1), sgd) for model in (scaled, plain)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for seed in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(scaled(make_input(seed))).backward()
        scaler.step(optimizers[0])
        scaler.update()
        plain(make_input(seed)).backward()
        optimizers[1].step()
    close(scaled, plain)
    before = weights_of(scaled), state_of(optimizers[0])
    optimizers[0].zero_grad()
    scaler.scale(scaled(make_input(2)) * torch.inf).backward()
    scaler.step(optimizers[0])
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert same(before[0], weights_of(scaled))
    after = state_of(optimizers[0])
    torch.testing.assert_close(after, before[1], rtol=0, atol=0)


def test_a_grad_scaler_sees_inf_in_the_tables_alone():
    model = Model()
    optimizer = fuse(model.ebc, optimizer=SGD(lr=0.1), update="on_step").fused_optimizer
    before = weights_of(model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model.ebc(make_input(0)).values().sum() * torch.inf).backward()
    scaler.step(optimizer)
    assert same(before, weights_of(model))


@pytest.mark.parametrize("wrap", [lambda o: o, lambda o: WarmupOptimizer(o, [])])
def test_a_grad_scaler_refuses_updates_in_backward(wrap):
    model = Model()
    optimizer = wrap(combined(model, SGD(lr=0.1), sgd, "in_backward"))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(make_input(0))).backward()
    with pytest.raises(ValueError, match=r"GradScaler.*on_step"):
        scaler.step(optimizer)
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("reset", ["optimizer", "module"])
def test_zero_grad_forgets_collected_gradients(set_to_none, reset):
    model, fresh = Model(), Model()
    optimizers = [
        fuse(one.ebc, optimizer=SGD(lr=0.1), update="on_step").fused_optimizer for one in (model, fresh)
    ]
    model(make_input(0)).backward()
    (optimizers[0] if reset == "optimizer" else model).zero_grad(set_to_none=set_to_none)
    for one, optimizer in zip((model, fresh), optimizers, strict=True):
        one(make_input(1)).backward()
        optimizer.step()
    close(model, fresh)


def test_a_step_without_backward_does_nothing():
    model = Model()
    optimizer = combined(model, Adam(lr=0.1), sgd)
    before = weights_of(model)
    optimizer.step()
    assert same(before, weights_of(model))
    assert {slots["step"] for slots in model.ebc.fused_optimizer.state.values()} == {0}


def test_a_closure_is_evaluated_with_gradients():
    model, plain = Model(), Model()
    optimizers = [
        fuse(one.ebc, optimizer=SGD(lr=0.1), update="on_step").fused_optimizer for one in (model, plain)
    ]

    def closure():
        loss = model(make_input(0))
        loss.backward()
        return loss

    expected = plain(make_input(0))
    expected.backward()
    optimizers[1].step()
    assert torch.equal(optimizers[0].step(closure), expected)
    close(model, plain)


def test_a_dense_gradient_is_refused():
    model = Model()
    optimizer = fuse(model.ebc, optimizer=SGD(lr=0.1), update="on_step").fused_optimizer
    weight = model.ebc.embedding_bags["t1"].weight
    weight.grad = torch.ones_like(weight)
    before = weights_of(model)
    with pytest.raises(ValueError, match=r"'embedding_bags.t1.weight'"):
        optimizer.step()
    assert same(before, weights_of(model))


def test_clipping_refuses_updates_in_backward():
    optimizer = combined(Model(), SGD(lr=0.1), sgd, "in_backward")
    with pytest.raises(ValueError, match="on_step"):
        GradientClippingOptimizer(optimizer, GradientClipping.NORM, 1.0)


def test_a_dense_optimizer_never_meets_the_collected_gradients():
    model = Model()
    fused = fuse(model.ebc, optimizer=SGD(lr=0.1), update="on_step").fused_optimizer
    assert [group["params"] for group in fused.param_groups] == [list(model.ebc.parameters())]
    assert fused.updates_in_backward is False


@pytest.mark.parametrize("data_type", ["FP16", "BF16"])
def test_gradients_of_half_precision_tables_accumulate(data_type):
    config = EmbeddingBagConfig(
        name="t",
        num_embeddings=4,
        embedding_dim=2,
        feature_names=["f"],
        data_type=DataType(data_type),
    )
    ebc = fuse(EmbeddingBagCollection([config]), optimizer=SGD(lr=0.5), update="on_step")
    (weight,) = ebc.parameters()
    weight.detach().zero_()
    kjt = KeyedJaggedTensor(["f"], torch.tensor([0, 1, 0]), lengths=torch.tensor([2, 1]))
    for _ in range(3):
        ebc(kjt).values().sum().backward()
    ebc.fused_optimizer.step()
    assert weight[:, 0].tolist() == [-3.0, -1.5, 0.0, 0.0]
