import logging

import pytest
import torch

from meshrec import (
    BoundsCheckMode,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    fuse,
)
from meshrec.modules.table_lookup import make_weight, spans
from meshrec.optim import SGD

ROWS, DIM = 10, 4
TABLES = {"users": ["user", "friend"], "items": ["item"]}


def make_bags(tables=TABLES, **options):
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=features)
        for name, features in tables.items()
    ]
    return EmbeddingBagCollection(configs, **options)


def make_sequences(tables=TABLES, **options):
    configs = [
        EmbeddingConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=features)
        for name, features in tables.items()
    ]
    return EmbeddingCollection(configs, **options)


BOTH = pytest.mark.parametrize("make", [make_bags, make_sequences])


def make_input(values=(0, 1, 2, 3, 4, 5, 6, 7), weights=None, keys=("user", "friend", "item")):
    """Two samples per key: [0] [1 2], [] [3 4], [5 6 7] []."""
    return KeyedJaggedTensor(
        list(keys), torch.tensor(values), weights, lengths=torch.tensor([1, 2, 0, 2, 3, 0])
    )


def snapshot(module):
    optimizer = module.fused_optimizer
    tensors = [*module.state_dict().values()]
    for slots in optimizer.state.values():
        tensors += [torch.as_tensor(slot) for slot in slots.values()]
    return [tensor.clone() for tensor in tensors]


@BOTH
def test_no_tables(make):
    with pytest.raises(ValueError, match="tables"):
        make({})


@pytest.mark.parametrize(
    ("collection", "config"),
    [(EmbeddingBagCollection, EmbeddingBagConfig), (EmbeddingCollection, EmbeddingConfig)],
)
def test_names_of_tables_are_unique(collection, config):
    table = config(name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f"])
    with pytest.raises(ValueError, match=r"\['t'\]"):
        collection([table, table])


@BOTH
def test_missing_features_are_named_with_their_tables(make):
    features = make_input(keys=("user", "x", "y"))
    message = (
        r"features \['friend', 'item'\] of tables \['items', 'users'\] are missing: "
        r"the input has the keys \['user', 'x', 'y'\]"
    )
    module = make()
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            module(features)


def test_missing_weights():
    with pytest.raises(ValueError, match="is_weighted=True"):
        make_bags(is_weighted=True)(make_input())


@BOTH
def test_input_on_another_device(make):
    with pytest.raises(ValueError, match="'users'"):
        make(device="meta")(make_input())


@BOTH
@pytest.mark.parametrize("bad", [ROWS, -1, 2**40])
@pytest.mark.parametrize(
    ("position", "table", "feature", "sample"),
    [(2, "users", "user", 1), (3, "users", "friend", 1), (5, "items", "item", 0)],
)
def test_ids_outside_their_table_are_named(make, bad, position, table, feature, sample):
    values = list(range(8))
    values[position] = bad
    message = (
        rf"table '{table}': id {bad} of feature '{feature}' \(sample {sample}\) is outside \[0, {ROWS}\). "
        "Raise num_embeddings, or hash the ids"
    )
    with pytest.raises(ValueError, match=message):
        make()(make_input(values))


@BOTH
@pytest.mark.parametrize("update", ["in_backward", "on_step"])
def test_a_failed_forward_changes_nothing(make, update):
    module = fuse(make(), optimizer=SGD(lr=0.1), update=update)
    before = snapshot(module)
    with pytest.raises(ValueError, match="outside"):
        module(make_input([0, 1, 2, 3, 4, 5, 6, ROWS]))
    assert all(torch.equal(one, other) for one, other in zip(snapshot(module), before, strict=True))
    assert all(weight.grad is None for weight in module.parameters())


@BOTH
def test_ids_of_keys_that_no_table_reads_are_not_looked_at(make):
    module = make({"users": ["user"]})
    module(make_input([0, 1, 2, -3, 99, 5, 6, 2**40]))


def test_nan_weights_are_named():
    weights = torch.ones(8)
    weights[4] = float("nan")
    message = r"table 'users': the weight of id 4 of feature 'friend' \(sample 1\) is NaN"
    with pytest.raises(ValueError, match=message):
        make_bags(is_weighted=True)(make_input(weights=weights))


@BOTH
@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1, 2, 0, 2, 3, 1], "the lengths sum to 9,? but there are 8 values"),
        ([1, 2, 0, 2, 2, 0], "the lengths sum to 7,? but there are 8 values"),
        ([1, 4, -2, 2, 3, 0], "5.*3.*bag 2"),
    ],
)
def test_lengths_that_do_not_fit(make, lengths, message):
    features = KeyedJaggedTensor(["user", "friend", "item"], torch.arange(8), lengths=torch.tensor(lengths))
    with pytest.raises(ValueError, match=message):
        make()(features)


def test_offsets_that_do_not_start_at_zero():
    features = KeyedJaggedTensor(["user"], torch.arange(3), offsets=torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match=r"offsets.*1.*0"):
        make_bags({"users": ["user"]})(features)


def test_batch_sizes_of_their_own_need_inverse_indices():
    features = KeyedJaggedTensor(
        ["user", "friend", "item"],
        torch.arange(3),
        lengths=torch.tensor([1, 1, 1, 0]),
        stride_per_key=[1, 2, 1],
    )
    with pytest.raises(ValueError, match=r"\[1, 2, 1\].*inverse_indices"):
        make_bags()(features)


def test_inverse_indices_name_every_feature():
    features = KeyedJaggedTensor(
        ["user", "item"],
        torch.arange(3),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key=[1, 2],
        inverse_indices=(["user"], torch.zeros(1, 2, dtype=torch.int64)),
    )
    with pytest.raises(ValueError, match=r"\['item'\].*\['user'\]"):
        make_bags({"users": ["user"], "items": ["item"]})(features)


@BOTH
def test_warn_takes_row_0_counts_and_says_so_once(make, caplog):
    module = make(bounds_check=BoundsCheckMode.WARN)
    assert module.num_clamped_ids == 0
    values = [0, ROWS, 2, 3, 4, -1, 77, 7]
    features, clamped = make_input(values), make_input([0, 0, 2, 3, 4, 0, 0, 7])
    with caplog.at_level(logging.WARNING, logger="meshrec"):
        module(clamped)
        assert caplog.messages == []
        result, expected = module(features), module(clamped)
        module(features)
    assert len(caplog.messages) == 1
    assert "3 IDs lie outside their table, most of them in feature 'item' for table 'items'" in caplog.text
    assert module.num_clamped_ids == 6
    assert features.values().tolist() == values
    if make is make_bags:
        assert torch.equal(result.values(), expected.values())
    else:
        assert all(torch.equal(result[key].values(), expected[key].values()) for key in expected)


@BOTH
def test_warn_does_not_break_the_graph(make, caplog):
    torch.manual_seed(0)
    module = make(bounds_check=BoundsCheckMode.WARN)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    features = make_input([0, ROWS, 2, 3, 4, -1, 77, 7])
    with caplog.at_level(logging.WARNING, logger="meshrec"):
        results = [compiled(features), compiled(features)]
    assert module.num_clamped_ids == 6
    assert [record.name for record in caplog.records].count("meshrec") == 1
    for result in results:
        expected = module(features)
        if make is make_bags:
            assert torch.equal(result.values(), expected.values())
        else:
            assert all(torch.equal(result[key].values(), expected[key].values()) for key in expected)


@pytest.mark.parametrize("fused", [False, True])
def test_warn_sends_the_gradient_to_row_0(fused):
    module = make_bags({"items": ["item"]}, bounds_check=BoundsCheckMode.WARN)
    weight = module.embedding_bags["items"].weight
    before = weight.detach().clone()
    if fused:
        fuse(module, optimizer=SGD(lr=1.0))
    module(make_input([0, 1, 2, 3, 4, 5, ROWS, -7])).values().sum().backward()
    gradient = before - weight.detach() if fused else weight.grad
    touched = torch.zeros(ROWS, DIM)
    touched[0], touched[5] = 2, 1
    torch.testing.assert_close(gradient, touched)


def test_off_looks_up_as_ever():
    torch.manual_seed(0)
    unchecked = make_bags(bounds_check=BoundsCheckMode.OFF)
    torch.manual_seed(0)
    assert torch.equal(unchecked(make_input()).values(), make_bags()(make_input()).values())


def test_off_does_not_look_at_weights():
    weights = torch.full((8,), float("nan"))
    module = make_bags(is_weighted=True, bounds_check=BoundsCheckMode.OFF)
    assert bool(module(make_input(weights=weights))["user"].isnan().all())


def test_weights_of_any_float_type_scale_rows():
    torch.manual_seed(0)
    module, weights = make_bags(is_weighted=True), torch.linspace(-1, 1, 8)
    exact = module(make_input(weights=weights.half().float())).values()
    half = weights.half().requires_grad_()
    result = module(make_input(weights=half)).values()
    assert torch.equal(result, exact)
    result.sum().backward()
    assert half.grad.dtype == torch.float16


@BOTH
def test_tables_of_a_type_without_kernels(make):
    with pytest.raises(ValueError, match=r"float32.*float16.*bfloat16"):
        make().double()(make_input())


def test_make_weight_leaves_meta_alone():
    config = EmbeddingConfig(name="t", num_embeddings=3, embedding_dim=2, feature_names=["f"])
    assert make_weight(config, torch.device("meta")).is_meta
    weight = make_weight(config, None)
    assert weight.requires_grad
    assert bool((weight.abs() <= 3**-0.5).all())


def test_spans():
    assert spans([3, 0, 2]) == [(0, 3), (3, 3), (3, 5)]
