"""What happens to fused tables when somebody else changes ids, weights, tables or parameters."""

import threading

import pytest
import torch
from torch import nn

from meshrec import KeyedJaggedTensor, fuse
from meshrec.optim import SGD, Adam

from .models import UPDATES, loss_of, make_bags, make_input, make_sequences, same, train, weights_of


def weighted_input():
    features = make_input()
    values = features.values()
    return KeyedJaggedTensor(
        features.keys(), values, torch.ones(len(values)), offsets=features.offsets().clone()
    )


def change_ids(features, module):
    features.values().fill_(3)


def change_offsets(features, module):
    features.offsets().zero_()


def change_weights(features, module):
    features.weights().fill_(2)


def change_table(features, module):
    with torch.no_grad():
        next(module.parameters()).add_(1)


def load_table(features, module):
    module.load_state_dict({name: value + 1 for name, value in module.state_dict().items()})


@UPDATES
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (change_ids, "the ids"),
        (change_offsets, "the offsets"),
        (change_weights, "the per-sample weights"),
        (change_table, "table 'embedding_bags.t0.weight'"),
        (load_table, "table 'embedding_bags.t0.weight'"),
    ],
)
def test_a_change_between_forward_and_backward_is_refused(update, change, named):
    module = fuse(make_bags(is_weighted=True), optimizer=Adam(lr=0.5), update=update)
    features = weighted_input()
    loss = loss_of(module, features)
    change(features, module)
    before = [weight.clone() for weight in weights_of(module)]
    with pytest.raises(ValueError, match=f"^{named} changed in place between the forward pass"):
        loss.backward()
    module.fused_optimizer.step()
    assert same(before, weights_of(module))
    train_again = loss_of(module, weighted_input())
    train_again.backward()  # the next batch is as good as any
    module.fused_optimizer.step()
    assert not same(before, weights_of(module))


def test_updates_of_the_optimizer_itself_are_no_change():
    """Two lookups before one backward pass, and a batch looked up before the update of the one before it."""
    module = fuse(make_sequences(), optimizer=SGD(lr=0.5))
    (loss_of(module, make_input(0)) + loss_of(module, make_input(1))).backward()
    early = loss_of(module, make_input(2))
    train(module)
    early.backward()


@pytest.mark.parametrize("assign", [False, True])
def test_a_replaced_parameter_is_refused(assign):
    module = fuse(make_bags(), optimizer=SGD(lr=0.5))
    if assign:
        module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True)
    else:
        table = module.embedding_bags["t0"]
        table.weight = nn.Parameter(table.weight.detach().clone())
    with pytest.raises(ValueError, match=r"'embedding_bags\.t0\.weight'"):
        module(make_input())
    with torch.no_grad():
        module(make_input())  # only training needs the old one


def test_adam_counts_every_update_of_several_threads():
    module = fuse(make_bags(), optimizer=Adam(lr=1e-3))
    batch = make_input()

    def work():
        for _ in range(50):
            loss_of(module, batch).backward()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    state = module.fused_optimizer.state_dict()["state"]
    assert {name: slots["step"] for name, slots in state.items()} == dict.fromkeys(state, 400)


def test_hooks_on_parameters_and_full_backward_hooks_are_not_called():
    """As docs/rooms/tables.md says: no gradient of a table is ever built."""
    module = fuse(make_bags(), optimizer=SGD(lr=0.5))
    called = []
    next(module.parameters()).register_hook(called.append)
    module.register_full_backward_hook(lambda *_: called.append(None))
    with pytest.warns(UserWarning, match="backward"):
        train(module, steps=1)
    assert called == []


def test_the_last_of_equal_keys_counts():
    """As docs/rooms/tables.md says."""
    module = make_bags()
    twice = KeyedJaggedTensor(["a", "b", "a"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 1, 1]))
    once = KeyedJaggedTensor(["a", "b"], torch.tensor([3, 2]), lengths=torch.tensor([1, 1]))
    assert torch.equal(module(twice).values(), module(once).values())
