import copy
import itertools

import pytest
import torch
from torch import nn

import meshrec
from meshrec.data import Batch
from meshrec.models.dlrm import DLRM, DLRMTrain
from meshrec.optim import Adam, RowWiseAdagrad
from meshrec.stages import Staged, StageError, split_seed, threads

NUM_ROWS, WIDTH = 30, 8


def chain(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(
        *itertools.chain(*((nn.Linear(12, 12), nn.ReLU(inplace=True)) for _ in range(5)))
    ).to(dtype)


def dlrm():
    torch.manual_seed(0)
    tables = [
        meshrec.EmbeddingBagConfig(
            name=f"t{i}",
            embedding_dim=WIDTH,
            num_embeddings=NUM_ROWS,
            feature_names=[f"f{i}"],
        )
        for i in range(3)
    ]
    return DLRM(meshrec.EmbeddingBagCollection(tables), 4, [16, WIDTH], [16, 8, 1])


def clicks(batch, seed=1):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (3 * batch,), generator=generator)
    ids = torch.randint(0, NUM_ROWS, (int(lengths.sum()),), generator=generator)
    sparse = meshrec.KeyedJaggedTensor.from_lengths_sync(["f0", "f1", "f2"], ids, lengths)
    dense = torch.randn(batch, 4, generator=generator)
    return Batch(dense, sparse, torch.randint(0, 2, (batch,), generator=generator).float())


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def train_step(model, x, y):
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize(
    ("cuts", "split_size"), [(["2"], 5), (["4", "7"], 1), (["2", "4", "8"], 16), (["8"], 6)]
)
def test_a_chain_gives_the_gradients_of_the_unsplit_model(cuts, split_size):
    plain = chain()
    staged = Staged(copy.deepcopy(plain), cuts=cuts, split_size=split_size)
    x, y = (
        torch.randn(16, 12, dtype=torch.float64, requires_grad=True),
        torch.randn(16, 12, dtype=torch.float64),
    )
    other = x.detach().clone().requires_grad_()
    torch.testing.assert_close(train_step(staged, x, y), train_step(plain, other, y), rtol=1e-12, atol=1e-15)
    assert gradients(staged).keys() == gradients(plain).keys()
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(staged)[name], gradient, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-12, atol=1e-15)


def test_workers_at_once_give_the_bits_of_one_worker():
    x, y = torch.randn(23, 12), torch.randn(23, 12)
    found = []
    for workers in (None, 1):
        staged = Staged(chain(torch.float32), cuts=["3", "7"], split_size=4, num_workers=workers)
        for _ in range(3):
            train_step(staged, x, y)
        found.append(gradients(staged))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[1])


@pytest.mark.parametrize("cuts", [["over_arch"], ["dense_arch", "over_arch.model.1"]])
@pytest.mark.parametrize("optimizer", [None, RowWiseAdagrad(lr=0.1), Adam(lr=0.01)])
def test_tables_step_once_per_batch(cuts, optimizer):
    models = [dlrm(), dlrm()]
    if optimizer is not None:
        for model in models:
            meshrec.fuse(model, optimizer=optimizer)
    plain, staged = (
        DLRMTrain(models[0]),
        Staged(DLRMTrain(models[1]), cuts=[f"model.{c}" for c in cuts], split_size=7),
    )
    for step in range(4):
        batch = clicks(20, seed=step)
        expected, (_, logits, labels) = plain(batch)
        loss, outputs = staged(batch)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(outputs.logits, logits, rtol=1e-5, atol=1e-6)
        assert torch.equal(outputs.labels, labels)
        for model in (plain, staged):
            model.zero_grad()
        expected.backward()
        loss.backward()
        assert gradients(plain).keys() == gradients(staged).keys()
        for name, gradient in gradients(plain).items():
            torch.testing.assert_close(gradients(staged)[name], gradient, rtol=1e-4, atol=1e-6)
        if optimizer is not None:
            state = [m.fused_optimizer.state_dict()["state"] for m in models]
            steps = {int(slots["step"]) for slots in state[1].values()}
            assert steps == {step + 1}
    for (name, one), other in zip(plain.named_parameters(), staged.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


class Branches(nn.Module):
    """Skips past a stage, a batch in a dict, a second result, and a branch on data in a submodule."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(12, 2)
        self.odd = OnData()

    def forward(self, batch, *, scale):
        a = self.first(batch["x"])
        b = self.odd(self.second(a.relu()))
        return {"out": self.third(torch.cat([a, b], 1)) * scale, "again": b, "x": batch["x"]}


class OnData(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x * 3


def test_skips_nests_and_branches_on_data():
    torch.manual_seed(0)
    plain = Branches().double()
    staged = Staged(copy.deepcopy(plain), cuts=["second", "third"], split_size=16)
    batch = {"x": torch.rand(16, 6, dtype=torch.float64), "note": "kept"}
    results = [model(batch, scale=0.5) for model in (plain, staged)]
    for result in results:
        (result["out"].sum() + result["again"].square().sum()).backward()
    for name in ("out", "again", "x"):
        torch.testing.assert_close(results[1][name], results[0][name], rtol=1e-12, atol=0)
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(staged)[name], gradient, rtol=1e-12, atol=1e-15)


def test_backward_passes_may_run_in_one_thread_as_on_gpus(monkeypatch):
    monkeypatch.setattr(threads, "autograd_uses_threads", lambda devices: True)
    plain = chain()
    staged = Staged(copy.deepcopy(plain), cuts=["4", "7"], split_size=3)
    x, y = torch.randn(2, 16, 12, dtype=torch.float64)
    for model in (plain, staged):
        train_step(model, x, y)
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(staged)[name], gradient, rtol=1e-12, atol=1e-15)


def test_random_numbers_are_those_of_each_split_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 2))
    staged = Staged(model, cuts=["2"], split_size=5)
    x = torch.randn(13, 6)
    out = staged(x)
    first_seed, alone = staged.seed, []
    for k, part in enumerate(x.split(5)):
        torch.manual_seed(split_seed(first_seed, k))
        alone.append(model(part))
    assert torch.equal(out, torch.cat(alone))
    torch.manual_seed(7)
    again = [staged(x) for _ in range(2)]
    torch.manual_seed(7)
    assert torch.equal(staged(x), again[0])
    assert not torch.equal(again[0], again[1])


def test_fused_dropout_draws_from_the_generator_of_its_split():
    class Fused(nn.Module):
        def forward(self, x):
            return torch.ops.aten.native_dropout(x, 0.25, True)[0]

    model = nn.Sequential(nn.Linear(40, 40), Fused(), nn.Linear(40, 40), Fused(), nn.Linear(40, 40), Fused())
    outputs = []
    for cuts in (["2"], ["4"]):
        staged = Staged(copy.deepcopy(model), cuts=cuts, split_size=3)
        torch.manual_seed(5)
        outputs.append(staged(torch.ones(6, 40, requires_grad=True)))
    assert torch.equal(*outputs)
    assert 0.1 < (outputs[0] == 0).float().mean() < 0.4
    assert not torch.equal(outputs[0][:3] == 0, outputs[0][3:] == 0)


def test_attention_without_dropout_draws_nothing():
    class Attention(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    model = nn.Sequential(nn.Linear(8, 8), Attention(), nn.Linear(8, 8))
    x = torch.randn(6, 2, 5, 8)
    torch.testing.assert_close(Staged(model, cuts=["2"], split_size=2)(x), model(x))


def test_what_cannot_be_drawn_per_split_is_refused():
    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.ops.aten.randn_like(x.detach(), out=torch.empty_like(x))

    staged = Staged(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Noise()), cuts=["1"], split_size=2)
    with pytest.raises(StageError, match=r"stage 1.*1.*split 0.*2"):
        staged(torch.randn(4, 4))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_deferred_batch_norm_moves_once_by_the_whole_batch(momentum):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.BatchNorm1d(6, momentum=momentum), nn.Linear(6, 6), nn.ReLU()).double()

    plain, staged = model(), Staged(model(), cuts=["1"], split_size=3, deferred_batch_norm=True)
    for _ in range(3):
        x = torch.randn(11, 6, dtype=torch.float64) * 3 + 50
        plain(x)
        staged(x)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(dict(staged.named_buffers())[name], buffer)
    assert staged.module[0].momentum == momentum


def test_without_gradients_and_under_autocast():
    plain = chain(torch.float32)
    staged = Staged(copy.deepcopy(plain), cuts=["4"], split_size=8)
    x = torch.randn(16, 12)
    with torch.no_grad():
        assert not staged(x).requires_grad
        torch.testing.assert_close(staged(x), plain(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert staged(x).dtype == plain(x).dtype == torch.bfloat16


def test_a_stage_that_raises_is_named_and_the_next_step_works():
    class Picky(nn.Module):
        def forward(self, x):
            if (x > 1e5).any():
                raise ValueError("too large")
            return x

    plain = nn.Sequential(nn.Linear(4, 4), Picky(), nn.Linear(4, 4))
    staged = Staged(copy.deepcopy(plain), cuts=["1"], split_size=2)
    bad = torch.zeros(8, 4)
    bad[5] = 1e9
    with pytest.raises(StageError, match=r"stage 1.*1.*2.*split 2.*4.*ValueError") as caught:
        staged(bad)
    assert isinstance(caught.value.__cause__, ValueError)
    x = torch.randn(8, 4)
    for model in (plain, staged):
        model(x).sum().backward()
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(staged)[name], gradient)


def test_a_second_backward_pass_is_refused():
    staged = Staged(chain(), cuts=["4"], split_size=8)
    loss = staged(torch.randn(16, 12, dtype=torch.float64)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward"):
        loss.backward()


def test_auto_measures_and_leaves_the_model_as_it_was():
    model = dlrm()
    meshrec.fuse(model, optimizer=RowWiseAdagrad(lr=0.1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    staged = Staged(model, num_stages=2)
    assert staged.stages == []
    batch = clicks(64)
    state = torch.get_rng_state()
    logits = staged(batch.dense, batch.sparse)
    assert len(staged.stages) == 2
    assert staged.choice.seconds >= staged.choice.bound * (1 - 1e-9) > 0  # sums of the same, in another order
    assert set(staged.choice.predicted) == {2, 4, 8, 16, 32, 64}
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    logits.sum().backward()
    assert staged(clicks(10).dense, clicks(10).sparse).shape == (10, 1)  # the last batch of an epoch
    assert state.shape == torch.get_rng_state().shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cuts": ["nothing"]}, "'nothing'"),
        ({"cuts": ["0"]}, "stage.*'0'"),
        ({"cuts": ["4", "2"]}, "stage.*'2'"),
        ({"cuts": "4"}, "'auto'"),
        ({"cuts": ["4"], "num_stages": 3}, "1 cuts.*make 2.*num_stages.*3"),
        ({"num_stages": 11}, "11 stages"),
        ({"cuts": ["4"], "devices": ["cpu"]}, "2 stages.*1 devices"),
        ({"cuts": ["4"], "split_size": 0}, "split_size.*0.*1"),
        ({"cuts": ["4"], "num_workers": 3}, "num_workers.*3.*1.*2"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Staged(chain(), **options)


def test_bad_batches_are_named():
    staged = Staged(chain(torch.float32), cuts=["4"], split_size=8)
    with pytest.raises(ValueError, match=r"split_size.*8.*0 samples"):
        staged(torch.randn(0, 12))
    with pytest.raises(ValueError, match="samples"):
        staged(None)
    two = Staged(Branches(), cuts=["third"], split_size=2)
    with pytest.raises(ValueError, match=r"'.*'.*3 samples.*4"):
        two({"y": torch.zeros(4), "x": torch.zeros(3, 6)}, scale=torch.ones(4, 1))


def test_a_parameter_lives_in_one_stage():
    shared = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"stage 0.*stage 1"):
        Staged(nn.Sequential(shared, nn.ReLU(), shared), cuts=["1"])


class Twice(nn.Module):
    """Uses ``a`` twice, and the weight of ``a`` in ``tied`` too if it is given one."""

    def __init__(self, tied=False):
        super().__init__()
        self.first, self.a, self.b, self.last = (nn.Linear(8, 8) for _ in range(4))
        self.tied = nn.Linear(8, 8)
        if tied:
            self.tied.weight = self.a.weight

    def forward(self, x):
        return self.last(self.tied(self.a(torch.relu(self.b(self.a(self.first(x)))))))


@pytest.mark.parametrize(("tied", "most"), [(False, 4), (True, 3)])
def test_chosen_stages_keep_the_uses_of_a_parameter_together(tied, most):
    torch.manual_seed(0)
    model = Twice(tied)
    plain, x = copy.deepcopy(model), torch.randn(8, 8)
    for num_stages in range(2, most + 1):
        staged = Staged(copy.deepcopy(model), num_stages=num_stages, split_size=4)
        torch.testing.assert_close(staged(x), plain(x))
        assert len(staged.stages) == num_stages
    with pytest.raises(ValueError, match=f"'a.weight'.*{most}.*{most + 1}"):
        Staged(model, num_stages=most + 1)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 8), nn.Identity(), nn.Dropout(0.0)
        self.flat, self.act, self.last = nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(8, 1)

    def forward(self, x):
        x = self.drop(self.norm(self.first(x)))
        return self.last(self.act(self.flat(x.view(-1, 2, 4))))


@pytest.mark.parametrize("cuts", ["auto", ["act"], ["norm"]])
def test_operations_in_place_after_a_cut(cuts):
    torch.manual_seed(0)
    model = InPlace()
    x = torch.randn(10, 6)
    expected = model(x)
    expected.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    staged = Staged(model, cuts=cuts, num_stages=2, split_size=4)
    found = staged(x)
    found.sum().backward()
    torch.testing.assert_close(found, expected)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_batch_smaller_than_a_split_is_one_split():
    model = InPlace()
    staged = Staged(model, cuts=["act"], split_size=64)
    x = torch.randn(3, 6)
    torch.testing.assert_close(staged(x), model(x))
