"""Optimizers that step in the backward pass, without sharding."""

import json
import sys
from pathlib import Path

import torch
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=f"t{i}", embedding_dim=4, num_embeddings=8, feature_names=[f"f{i}"])
                for i in range(3)
            ]
        )
        self.over = torch.nn.Linear(12, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.ebc(features).values()).squeeze(1)


torch.manual_seed(0)
model = Model()
tables = model.ebc.embedding_bags
apply_optimizer_in_backward(torch.optim.SGD, [tables["t0"].weight], {"lr": 0.5})
_apply_optimizer_in_backward(RowWiseAdagrad, [tables["t1"].weight], {"lr": 0.1, "eps": 1e-4})
_apply_optimizer_in_backward(torch.optim.Adagrad, [tables["t2"].weight], {"lr": 0.1})
dense = KeyedOptimizerWrapper(
    dict(in_backward_optimizer_filter(model.named_parameters())),
    lambda params: torch.optim.Adam(params, lr=0.05),
)
found = {
    "dense": sorted(dense.params),
    "tables": [name for name, _ in in_backward_optimizer_filter(model.named_parameters(), include=True)],
    "losses": [],
}
features = KeyedJaggedTensor.from_lengths_sync(
    keys=["f0", "f1", "f2"],
    values=torch.tensor([1, 2, 2, 3, 0, 7, 4, 4, 5]),
    lengths=torch.tensor([2, 1, 1, 2, 0, 3]),
)
labels = torch.tensor([0.0, 1.0])
for _ in range(5):
    dense.zero_grad()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(features), labels)
    loss.backward()
    dense.step()
    found["losses"].append(loss.item())
found["weights"] = {name: value.tolist() for name, value in model.state_dict().items()}
found["state"] = sorted(dense.state_dict()["state"])

plain = torch.nn.Parameter(torch.arange(6.0).view(3, 2))
optimizer = RowWiseAdagrad([plain], lr=0.1, lr_decay=0.01, weight_decay=0.1, initial_accumulator_value=0.5)
for step in range(3):
    optimizer.zero_grad()
    (plain * torch.tensor([[1.0, 2.0]]) * step).sum().backward()
    optimizer.step()
found["plain"] = [plain.tolist(), optimizer.state[plain]["sum"].tolist()]
Path(sys.argv[1]).write_text(json.dumps(found))
