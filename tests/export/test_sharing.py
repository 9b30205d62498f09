"""What samples share is computed once, and gives what repeating it gives."""

import functools
import os

import pytest
import torch
from torch import nn

import meshrec
from meshrec.export.program import Program, export_program
from meshrec.models.deepfm import DeepFMModel
from meshrec.models.dlrm import DLRM, DLRM_DCN
from tests.export.conftest import torchs_own_warnings

FEATURES = ["a", "b", "c", "d"]
NUM_DENSE, NUM_ROWS, DIM = 3, 40, 4
LINEAR, DOTS = torch.ops.aten.linear.default, torch.ops.meshrec.dot_interaction.default
BATCH, ROWS = 7, 3


def tables():
    return meshrec.EmbeddingBagCollection(
        [
            meshrec.EmbeddingBagConfig(
                name=f"t_{f}", embedding_dim=DIM, num_embeddings=NUM_ROWS, feature_names=[f]
            )
            for f in FEATURES
        ]
    )


class Towers(nn.Module):
    """A user's part of many kinds of layers, an item's, and what is over both."""

    def __init__(self):
        super().__init__()
        self.sparse_arch = tables()
        self.user = nn.Sequential(nn.Linear(2 * DIM + NUM_DENSE, 6), nn.LayerNorm(6), nn.GELU(), nn.Dropout())
        self.gate = nn.Linear(NUM_DENSE, 6)
        self.item = nn.Linear(2 * DIM, 6)
        self.over = nn.Linear(18, 1)

    def forward(self, dense, sparse):
        by_name = self.sparse_arch(sparse).to_dict()
        user = self.user(torch.cat([by_name["a"], dense, by_name["c"]], dim=-1))
        user = user * self.gate(dense).sigmoid() + 1
        item = self.item(torch.cat([by_name["b"], by_name["d"]], dim=1))
        both = torch.stack([user, item], dim=1)  # unknown to the pass: it sees the repeated rows
        return self.over(torch.cat([user, item, both.sum(1)], dim=1).view(-1, 9, 2).flatten(1))


MODELS = {
    "DLRM": lambda: DLRM(tables(), NUM_DENSE, [8, DIM], [16, 8, 1]),
    "DCN": lambda: DLRM_DCN(tables(), NUM_DENSE, [8, DIM], [16, 8, 1], 2, 3),
    "DeepFM": lambda: DeepFMModel(tables(), NUM_DENSE, [8, DIM], [16, 1]),
    "Towers": Towers,
}
USERS = [["a", "c", "dense"], ["a", "c"], ["b", "c", "d", "dense"], ["d"], ["dense"]]


# Every model with two or three users, and every user with two models; a thorough run takes all pairs.
PAIRS = [
    pytest.param(model, user, id=f"{model}-{'+'.join(user)}")
    for at, model in enumerate(MODELS)
    for number, user in enumerate(USERS)
    if (at + number) % 2 == 0 or "MESHREC_THOROUGH" in os.environ
]


@functools.cache
def model_of(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # so that every input changes the scores
            parameter.normal_(0, 0.5)
    return model


def program_of(model, shared):
    """A function, and its graph."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    weights = [each.detach() for each in state.values()]
    program = Program(model, list(state), FEATURES, lambda logits: logits, shared)
    with torchs_own_warnings():
        found = export_program(program, weights, FEATURES, NUM_DENSE, shared)
        module = found.module()
    return lambda *inputs: module(weights, *inputs), found.graph


@functools.cache
def plain_program(name):
    """The program of a model that shares nothing."""
    return program_of(model_of(name), [])[0]


def bags(feature, num):
    draw = torch.Generator().manual_seed(ord(feature) + num)
    lengths = torch.randint(0, 4, (num,), generator=draw)
    return list(torch.randint(0, NUM_ROWS, (int(lengths.sum()),), generator=draw).split(lengths.tolist()))


def joined(given):
    return torch.cat([torch.zeros(0, dtype=torch.int64), *given]), torch.tensor(
        [len(b) for b in given]
    ).long()


@pytest.mark.parametrize(("name", "user"), PAIRS)
def test_the_scores_are_those_of_repeating(name, user):
    once, _ = program_of(model_of(name), user)
    plain = plain_program(name)
    for num_rows, batch in ((1, 6), (ROWS, BATCH), (2, 0)):
        group = torch.arange(batch) * 5 % num_rows
        of_row = {f: bags(f, num_rows if f in user else batch) for f in FEATURES}
        of_sample = {f: [each[row] for row in group] if f in user else each for f, each in of_row.items()}
        dense = torch.randn(num_rows if "dense" in user else batch, NUM_DENSE)
        repeated = dense[group] if "dense" in user else dense
        scores = []
        for run, given, rows, more in ((once, of_row, dense, [group]), (plain, of_sample, repeated, [])):
            values, lengths = zip(*(joined(given[f]) for f in FEATURES), strict=True)
            with torch.inference_mode():
                scores.append(run(rows, list(values), list(lengths), *more))
        torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-5)
        assert batch == 0 or scores[0].std() > 0.1


def rows_of(graph, target):
    """Inputs of layers: whether they have a row for each sample, or for what these share."""
    batch = next(node for node in graph.nodes if node.name == "group").meta["val"].shape[0]
    nodes = [node for node in graph.nodes if node.target is target]
    return [
        ("sample" if node.meta["val"].shape[0] == batch else "row", node.args[0].meta["val"].shape[1])
        for node in nodes
    ]


def test_layers_and_dot_products_of_the_user_run_once_a_row():
    _, graph = program_of(MODELS["DLRM"]().eval(), ["a", "c", "dense"])
    assert rows_of(graph, DOTS) == [("row", DIM), ("sample", DIM)]
    # Of 5 vectors 3 are the user's: 3 of 10 pairs and the dense vector itself.
    over = [("sample", 7), ("row", DIM + 3), ("sample", 16), ("sample", 8)]
    assert rows_of(graph, LINEAR) == [("row", NUM_DENSE), ("row", 8), *over]


def test_a_tower_of_the_user_runs_once_a_row():
    _, graph = program_of(Towers().eval(), ["a", "c", "dense"])
    user, gate, item, *over = rows_of(graph, LINEAR)
    assert (user, gate, item) == (("row", 2 * DIM + NUM_DENSE), ("row", NUM_DENSE), ("sample", 2 * DIM))
    assert over == [("sample", 12), ("row", 6)]
    for layer in (torch.ops.aten.layer_norm.default, torch.ops.aten.gelu.default, torch.ops.aten.mul.Tensor):
        assert rows_of(graph, layer) == [("row", 6)]


def test_few_shared_columns_are_not_worth_a_layer_of_their_own():
    _, graph = program_of(MODELS["DCN"]().eval(), ["d"])
    assert all(rows == "sample" for rows, width in rows_of(graph, LINEAR) if width != NUM_DENSE)
