"""Keyed optimizers: wrapped, combined, clipped and warmed up."""

import json
import sys
from pathlib import Path

import torch
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))


def keyed(module: torch.nn.Module, lr: float = 0.1) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(
        dict(module.named_parameters()), lambda params: torch.optim.Adagrad(params, lr=lr)
    )


class Counting(OptimizerWrapper):
    steps = 0

    def step(self, closure: object = None) -> None:
        super().step(closure)
        self.steps += 1


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 8) -> list[float]:
    inputs = torch.linspace(-1, 1, 12).view(4, 3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(inputs) - 3).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


found = {}
model = make_model()
combined = CombinedOptimizer([("first", keyed(model[0])), ("last", keyed(model[2], 0.2))])
found["combined"] = [
    train(model, combined),
    sorted(combined.params),
    sorted(combined.state_dict()),
    {name: sorted(slots) for name, slots in sorted(combined.state_dict()["state"].items())},
    [group["lr"] for group in combined.param_groups],
]

model = make_model()
clipped = GradientClippingOptimizer(keyed(model), clipping=GradientClipping.NORM, max_gradient=0.05)
found["clipped by norm"] = train(model, clipped)
model = make_model()
clipped = GradientClippingOptimizer(keyed(model), clipping=GradientClipping.VALUE, max_gradient=0.05)
found["clipped by value"] = train(model, clipped)

model = make_model()
warm = WarmupOptimizer(
    keyed(model),
    stages=[
        WarmupStage(WarmupPolicy.LINEAR, max_iters=3, value=0.1),
        WarmupStage(policy=WarmupPolicy.CONSTANT, max_iters=5, value=0.5, lr_scale=2.0),
        WarmupStage(policy=WarmupPolicy.POLY, max_iters=20, value=2.0),
    ],
    lr=0.3,
)
rates = []
for _ in range(8):
    rates.append(warm.param_groups[0]["lr"])
    train(model, warm, steps=1)
found["warmed up"] = [rates, sorted(warm.state_dict()["state"]), train(model, warm)]

model = make_model()
counting = Counting(keyed(model))
found["wrapped"] = [train(model, counting), counting.steps, sorted(counting.params)]

model, other = make_model(), make_model()
first, second = keyed(model), keyed(other)
train(model, first)
second.init_state()
second.load_state_dict(first.state_dict())
other.load_state_dict(model.state_dict())
found["resumed"] = [train(model, first), train(other, second)]
first.save_param_groups(True)
found["groups"] = first.state_dict()["param_groups"]
found["groups"] = [[group["params"], group["lr"]] for group in found["groups"]]
Path(sys.argv[1]).write_text(json.dumps(found))
