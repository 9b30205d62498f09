"""Every fused optimizer against its formula, row by row in float64, and against torch's."""

import pytest
import torch

from meshrec import fuse
from meshrec.optim import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    RowWiseAdagrad,
    RowWiseRMSpropAR,
    apply_optimizer_in_backward,
)

from .models import (
    KINDS,
    TABLES,
    UPDATES,
    close,
    loss_of,
    make_bags,
    make_input,
    make_sequences,
    same,
    train,
    weights_of,
)


def row_step(spec, w, g, s, t):
    """One row's new weight in float64, from the formulas of the papers; ``s`` holds its state."""
    name, wd, lr = type(spec).__name__, spec.weight_decay, spec.lr
    stored = w
    if name != "LARS":
        if not spec.decoupled_weight_decay:
            g = g + wd * w
        elif "LAMB" not in name:
            w = w * (1 - lr * wd)
    if name == "SGD":
        return w - lr * g
    if name == "Adagrad":
        s["sum"] = s.get("sum", spec.initial_accumulator_value) + g**2
        return w - lr * g / (s["sum"] ** 0.5 + spec.eps)
    if name == "RowWiseAdagrad":
        s["sum"] = s.get("sum", spec.initial_accumulator_value) + (g**2).mean()
        return w - lr * g / (s["sum"] ** 0.5 + spec.eps)
    if name == "RowWiseRMSpropAR":
        s["v"] = spec.ema_beta * s.get("v", 0) + (1 - spec.ema_beta) * (g**2).mean()
        gap, s["prev"] = t - s.get("prev", t - 1), t
        shrinkage = max(spec.min_shrinkage, 1 - lr * spec.ar_alpha * gap)
        return shrinkage * w - lr * g / (s["v"] ** 0.5 + spec.eps)
    if name == "FTRL":
        n = s.get("n", torch.zeros_like(w))
        s["n"] = n + g**2
        s["z"] = s.get("z", 0) + g - (s["n"].sqrt() - n.sqrt()) / lr * w
        shrunk = s["z"].sign() * (s["z"].abs() - spec.l1).clamp(min=0)
        return -shrunk / ((spec.beta + s["n"].sqrt()) / lr + spec.l2)
    if name == "LARS":
        decay = 0 if spec.decoupled_weight_decay else wd
        norms = stored.norm(), g.norm()
        local = spec.trust_coefficient * norms[0] / (norms[1] + decay * norms[0] + spec.eps)
        s["m"] = spec.momentum * s.get("m", 0) + lr * local * (g + decay * stored)
        return (w * (1 - lr * wd) if spec.decoupled_weight_decay else w) - s["m"]
    b1, b2 = spec.betas
    square = (g**2).mean() if "Partial" in name else g**2
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * square
    step = s["m"] / (1 - b1**t) / ((s["v"] / (1 - b2**t)) ** 0.5 + spec.eps)
    if "LAMB" not in name:
        return w - lr * step
    if spec.decoupled_weight_decay:
        step = step + wd * w
    return w - lr * w.norm() / step.norm() * step


class Reference:
    """Rows with a gradient from plain autograd, row by row through the formula."""

    def __init__(self, module, specs):
        self.module, self.specs = module, specs
        self.states = [[{} for _ in weight] for weight in module.parameters()]
        self.times = [0 for _ in specs]

    def step(self, features):
        parameters = list(self.module.parameters())
        touched = {
            "t0": {*features["a"].values().tolist(), *features["b"].values().tolist()},
            "t1": set(features["b"].values().tolist()),
        }
        grads = torch.autograd.grad(loss_of(self.module, features), parameters)
        for index, (name, weight) in enumerate(zip(TABLES, parameters, strict=True)):
            self.times[index] += 1
            for row in touched[name]:
                new = row_step(
                    self.specs[index],
                    weight.data[row].double(),
                    grads[index][row].double(),
                    self.states[index][row],
                    self.times[index],
                )
                weight.data[row] = new.float()


SPECS = [
    kind(
        lr=0.1,
        weight_decay=decay,
        decoupled_weight_decay=decoupled,
        **({"ar_alpha": 3.0} if kind is RowWiseRMSpropAR else {}),
    )
    for kind in KINDS
    for decay, decoupled in [(0.0, False), (0.3, False), (0.3, True)]
    if not (kind is FTRL and decoupled)
]


def name_of(spec):
    decay = "decoupled" if spec.decoupled_weight_decay else "l2" if spec.weight_decay else "plain"
    return f"{type(spec).__name__}-{decay}"


@UPDATES
@pytest.mark.parametrize("make", [make_bags, make_sequences])
@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_every_optimizer_follows_its_formula(spec, make, update):
    module, reference = fuse(make(), optimizer=spec, update=update), Reference(make(), [spec, spec])
    for seed in range(4):
        features = make_input(seed)
        reference.step(features)
        module.fused_optimizer.zero_grad()
        loss_of(module, features).backward()
        module.fused_optimizer.step()
    close(module, reference.module)
    assert not same(weights_of(module), weights_of(make()))


@pytest.mark.parametrize(
    ("spec", "dense"),
    [
        (SGD(lr=0.2, weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=0.2, weight_decay=0.1)),
        (Adagrad(lr=0.2, eps=1e-10), lambda p: torch.optim.Adagrad(p, lr=0.2)),
        (
            Adagrad(lr=0.2, initial_accumulator_value=0.5),
            lambda p: torch.optim.Adagrad(p, lr=0.2, initial_accumulator_value=0.5, eps=1e-8),
        ),
        (Adam(lr=0.2, weight_decay=0.1), lambda p: torch.optim.Adam(p, lr=0.2, weight_decay=0.1)),
        (
            Adam(lr=0.2, weight_decay=0.1, decoupled_weight_decay=True),
            lambda p: torch.optim.AdamW(p, lr=0.2, weight_decay=0.1),
        ),
    ],
    ids=["SGD", "Adagrad", "Adagrad-initial", "Adam", "AdamW"],
)
def test_where_all_rows_are_touched_the_result_is_that_of_torch(spec, dense):
    fused, plain = fuse(make_bags(), optimizer=spec), make_bags()
    train(fused, all_rows=True)
    train(plain, optimizer=dense(plain.parameters()), all_rows=True)
    close(fused, plain)


def test_every_table_may_have_its_own_optimizer():
    specs = [Adam(lr=0.1), RowWiseAdagrad(lr=0.3)]
    module, reference = make_bags(), Reference(make_bags(), specs)
    apply_optimizer_in_backward(torch.optim.Adam, [module.embedding_bags["t0"].weight], {"lr": 0.1})
    fuse(module, optimizer=specs[1])
    for seed in range(3):
        reference.step(make_input(seed))
    close(train(module), reference.module)
    assert [group["lr"] for group in module.fused_optimizer.param_groups] == [0.1, 0.3]
