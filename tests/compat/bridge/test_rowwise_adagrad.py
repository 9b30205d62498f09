import warnings

import pytest
import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, fuse, optim
from meshrec.compat.bridge.rowwise_adagrad import RowWiseAdagrad
from meshrec.optim import apply_optimizer_in_backward

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's package uses what torch has deprecated
    from torch.distributed.optim import _apply_optimizer_in_backward


def weight(rows=3, width=2):
    return torch.nn.Parameter(torch.arange(1.0, 1 + rows * width).view(rows, width))


def test_the_formula():
    parameter = weight()
    optimizer = RowWiseAdagrad(
        [parameter], lr=0.5, lr_decay=0.1, weight_decay=0.01, initial_accumulator_value=0.2, eps=0.3
    )
    expected, total = parameter.detach().clone(), torch.full((3, 1), 0.2)
    for step in range(3):
        gradient = torch.full((3, 2), step + 1.0)
        parameter.grad = gradient.clone()
        optimizer.step()
        gradient = gradient + 0.01 * expected
        total = total + gradient.square().mean(1, keepdim=True)
        expected = expected - 0.5 / (1 + 0.1 * step) * gradient / (total.sqrt() + 0.3)
    torch.testing.assert_close(parameter.detach(), expected)
    torch.testing.assert_close(optimizer.state[parameter]["sum"], total)


def test_it_can_go_up():
    down, up = weight(), weight()
    for parameter, maximize in ((down, False), (up, True)):
        parameter.grad = torch.ones(3, 2)
        RowWiseAdagrad([parameter], lr=0.1, maximize=maximize).step()
    torch.testing.assert_close(up.detach() + down.detach(), 2 * weight().detach())


def test_sparse_gradients_touch_their_rows():
    dense, sparse = weight(), weight()
    gradient = torch.sparse_coo_tensor(
        torch.tensor([[2, 0, 2]]), torch.ones(3, 2), (3, 2), check_invariants=True
    )
    dense.grad, sparse.grad = gradient.to_dense(), gradient
    for parameter in (dense, sparse):
        RowWiseAdagrad([parameter], lr=0.1).step()
    torch.testing.assert_close(sparse.detach(), dense.detach())
    assert torch.equal(sparse[1], weight()[1])


def test_the_closure_is_evaluated():
    parameter = weight()

    def closure():
        loss = parameter.square().sum()
        loss.backward()
        return loss.item()

    assert RowWiseAdagrad([parameter]).step(closure) == 91
    assert parameter[0, 0] < 1


def test_state_is_saved_and_loaded():
    first, second = weight(), weight()
    one, other = RowWiseAdagrad([first]), RowWiseAdagrad([second])
    first.grad = torch.ones(3, 2)
    one.step()
    other.load_state_dict(one.state_dict())
    assert torch.equal(other.state[second]["sum"], one.state[first]["sum"])


@pytest.mark.parametrize("apply", [apply_optimizer_in_backward, _apply_optimizer_in_backward])
def test_fused_tables_compute_the_same(apply):
    features = KeyedJaggedTensor(["f"], torch.tensor([1, 2, 1]), lengths=torch.tensor([2, 1]))

    def collection():
        config = EmbeddingBagConfig(
            name="t",
            num_embeddings=3,
            embedding_dim=2,
            feature_names=["f"],
            init_fn=lambda tensor: tensor.copy_(weight()),
        )
        return EmbeddingBagCollection([config])

    plain, fused = collection(), collection()
    arguments = {"lr": 0.1, "eps": 1e-4, "initial_accumulator_value": 0.1}
    optimizer = RowWiseAdagrad(plain.parameters(), **arguments)
    apply(RowWiseAdagrad, fused.parameters(), arguments)
    fuse(fused)
    for _ in range(2):
        for module in (plain, fused):
            module(features).values().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(plain.state_dict(), fused.state_dict())


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"eps.*0.*-1"):
        RowWiseAdagrad([weight()], eps=-1)
    with pytest.raises(ValueError, match=r"\[rows, width\].*\[2\]"):
        RowWiseAdagrad([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="lr_decay"):
        RowWiseAdagrad.fused_spec({"lr_decay": 0.1})
    with pytest.raises(ValueError, match="'momentum'"):
        RowWiseAdagrad.fused_spec({"momentum": 0.1})
    assert RowWiseAdagrad.fused_spec({}) == optim.RowWiseAdagrad(lr=0.01, eps=1e-10)
