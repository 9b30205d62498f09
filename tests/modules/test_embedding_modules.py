import copy

import pytest
import torch

from meshrec import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    Hashed,
    JaggedTensor,
    KeyedJaggedTensor,
    PoolingType,
    fuse,
)
from meshrec.model_parallel import DistributedModelParallel
from meshrec.optim import SGD, RowWiseAdagrad
from meshrec.tables.module import TableModule

from .models import (
    BATCH,
    NAMES,
    READS,
    TABLES,
    gradients,
    make_bags,
    make_input,
    make_sequences,
    same_weights,
    trained,
)


def loop_over_bags(ebc, features):
    """What nn.EmbeddingBag gives, table by table."""
    columns = []
    for table, feature in READS:
        jt, bag = features[feature], ebc.embedding_bags[table]
        weights = jt.weights_or_none() if ebc.is_weighted() else None
        columns.append(
            torch.nn.functional.embedding_bag(
                jt.values(),
                bag.weight,
                jt.offsets().to(jt.values().dtype),
                mode=bag.mode,
                per_sample_weights=weights,
                include_last_offset=True,
            )
        )
    return torch.cat(columns, dim=1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_bags_are_those_of_a_loop_over_embedding_bag(pooling, dtype):
    ebc, features = make_bags(pooling), make_input(dtype=dtype)
    result = ebc(features)
    assert result.keys() == NAMES == ebc.embedding_names()
    assert result.length_per_key() == [7, 7, 16, 33]
    assert torch.equal(result.values(), loop_over_bags(ebc, features))


def test_weighted_bags_are_those_of_a_loop_over_embedding_bag():
    ebc, features = make_bags(is_weighted=True), make_input(weighted=True)
    assert ebc.is_weighted()
    assert torch.equal(ebc(features).values(), loop_over_bags(ebc, features))


def test_weighted_means_are_weighted_sums_by_length():
    features = make_input(weighted=True)
    means = make_bags(PoolingType.MEAN, is_weighted=True)(features)
    sums = make_bags(is_weighted=True)(features)
    for name, (_, feature) in zip(NAMES, READS, strict=True):
        lengths = features[feature].lengths().clamp(min=1)[:, None]
        torch.testing.assert_close(means[name], sums[name] / lengths)


def test_an_unweighted_collection_does_not_look_at_weights():
    ebc, features = make_bags(), make_input(weighted=True)
    plain = KeyedJaggedTensor(features.keys(), features.values(), lengths=features.lengths())
    assert torch.equal(ebc(features).values(), ebc(plain).values())


def test_pooling_is_per_table():
    tables = [
        EmbeddingBagConfig(
            name=name, num_embeddings=9, embedding_dim=4, feature_names=[feature], pooling=pooling
        )
        for name, feature, pooling in [("s", "a", PoolingType.SUM), ("m", "b", PoolingType.MEAN)]
    ]
    ebc, features = EmbeddingBagCollection(tables), make_input()
    result = ebc(features)
    for table, feature in [("s", "a"), ("m", "b")]:
        bag = ebc.embedding_bags[table]
        assert torch.equal(result[feature], bag(features[feature].values(), features[feature].offsets()))


def test_sequences_are_those_of_a_loop_over_embedding():
    ec, features = make_sequences(), make_input()
    result = ec(features)
    assert list(result) == NAMES
    for name, (table, feature) in zip(NAMES, READS, strict=True):
        assert torch.equal(result[name].values(), ec.embeddings[table](features[feature].values()))
        assert torch.equal(result[name].lengths(), features[feature].lengths())
        result[name].validate()


@pytest.mark.parametrize("keys", [("c", "b", "a"), ("x", "b", "y", "a", "c"), ("a", "b", "c", "z")])
def test_order_and_further_keys_of_the_input_do_not_matter(keys):
    ebc, ec, features = make_bags(), make_sequences(), make_input(keys)
    assert torch.equal(ebc(features).values(), loop_over_bags(ebc, features))
    sequences = ec(features)
    for name, (table, feature) in zip(NAMES, READS, strict=True):
        assert torch.equal(sequences[name].values(), ec.embeddings[table](features[feature].values()))


def test_the_order_of_keys_may_change_from_call_to_call():
    ebc = make_bags()
    for keys in [("a", "b", "c"), ("c", "a", "b"), ("a", "b", "c")]:
        features = make_input(keys)
        assert torch.equal(ebc(features).values(), loop_over_bags(ebc, features))


def test_a_batch_without_samples():
    features = make_input(batch=0)
    ebc, ec = fuse(make_bags(), optimizer=SGD(lr=0.1)), fuse(make_sequences(), optimizer=SGD(lr=0.1))
    pooled = ebc(features).values()
    assert pooled.shape == (0, 7 + 7 + 16 + 33)
    sequences = ec(features)
    assert [tuple(jt.values().shape) for jt in sequences.values()] == [(0, 7), (0, 7), (0, 16), (0, 33)]
    (pooled.sum() + sum(jt.values().sum() for jt in sequences.values())).backward()


def test_a_batch_without_ids():
    features = KeyedJaggedTensor(
        ["a", "b", "c"], torch.empty(0, dtype=torch.int64), lengths=torch.zeros(6, dtype=torch.int64)
    )
    pooled = fuse(make_bags(PoolingType.MEAN), optimizer=RowWiseAdagrad(lr=0.1))(features).values()
    pooled.sum().backward()
    assert torch.equal(pooled, torch.zeros(2, 63))


@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_half_precision_is_summed_in_fp32(data_type, pooling):
    ebc, wide, features = make_bags(pooling, data_type), make_bags(pooling), make_input()
    for (_, narrow), (_, exact) in zip(ebc.named_parameters(), wide.named_parameters(), strict=True):
        assert narrow.dtype == data_type.dtype
        exact.data.copy_(narrow)
    result = ebc(features).values()
    assert result.dtype == data_type.dtype
    assert torch.equal(result, wide(features).values().to(data_type.dtype))
    ec = make_sequences(data_type)
    assert torch.equal(ec(features)["c"].values(), ec.embeddings["t1"](features["c"].values()))


def test_tables_of_several_types_give_the_widest():
    tables = [
        EmbeddingBagConfig(
            name=name, num_embeddings=9, embedding_dim=4, feature_names=[name], data_type=data_type
        )
        for name, data_type in [("a", DataType.BF16), ("b", DataType.FP32), ("c", DataType.FP16)]
    ]
    ebc, features = EmbeddingBagCollection(tables), make_input()
    result = ebc(features)
    assert result.values().dtype == torch.float32
    for name in "abc":
        bags = torch.nn.functional.embedding_bag(
            features[name].values(),
            ebc.embedding_bags[name].weight.float(),
            features[name].offsets(),
            mode="sum",
            include_last_offset=True,
        )
        assert torch.equal(result[name], bags)


def test_names_of_parameters():
    assert [name for name, _ in make_bags().named_parameters()] == [
        f"embedding_bags.{table}.weight" for table in TABLES
    ]
    assert list(make_sequences().state_dict()) == [f"embeddings.{table}.weight" for table in TABLES]
    assert list(make_bags().tables()) == list(make_bags().state_dict())


@pytest.mark.parametrize(
    "options",
    [{"num_embeddings": 9, "data_type": DataType.INT4}, {"keys": Hashed(max_rows=9)}],
    ids=["quantised", "hashed"],
)
def test_one_class_holds_rows_of_every_storage_also_in_packages(options):
    config = EmbeddingBagConfig(name="t", embedding_dim=4, feature_names=["f"], **options)
    collection = EmbeddingBagCollection([config])
    assert type(collection.embedding_bags["t"]) is TableModule
    collection.serve()
    assert type(collection.embedding_bags["t"]) is TableModule


@pytest.mark.parametrize("name", ["items", "keys", "type", "forward"])
def test_tables_may_be_named_like_methods(name):
    config = EmbeddingBagConfig(name=name, num_embeddings=9, embedding_dim=4, feature_names=["a"])
    ebc, features = EmbeddingBagCollection([config]), make_input()
    assert list(ebc.state_dict()) == [f"embedding_bags.{name}.weight"]
    assert torch.equal(torch.compile(ebc, backend="eager")(features).values(), ebc(features).values())
    assert same_weights(ebc, copy.deepcopy(ebc.train().eval()))
    assert not same_weights(ebc, trained(fuse(copy.deepcopy(ebc), optimizer=SGD(lr=0.1))))


def test_configurations_are_kept():
    assert [config.name for config in make_bags().embedding_bag_configs()] == list(TABLES)
    assert [config.name for config in make_sequences().embedding_configs()] == list(TABLES)


def test_on_meta_nothing_is_filled_until_asked():
    filled = []

    def init_fn(weight):
        filled.append(tuple(weight.shape))
        weight.fill_(3)

    config = EmbeddingBagConfig(
        name="t", num_embeddings=9, embedding_dim=4, feature_names=["a"], init_fn=init_fn
    )
    ebc = EmbeddingBagCollection([config], device="meta")
    assert ebc.embedding_bags["t"].weight.is_meta
    assert ebc.device == torch.device("meta")
    assert filled == []
    ebc.to_empty(device="cpu")
    ebc.reset_parameters()
    assert filled == [(9, 4)]
    assert bool((ebc.embedding_bags["t"].weight == 3).all())


def test_init_fn_is_per_table():
    fills = {"t0": 1.0, "t1": 2.0}
    ec = EmbeddingCollection(
        [
            EmbeddingConfig(
                name=name,
                num_embeddings=3,
                embedding_dim=2,
                feature_names=[name],
                init_fn=lambda weight, value=value: weight.fill_(value),
            )
            for name, value in fills.items()
        ]
    )
    assert {name: ec.embeddings[name].weight.detach().mean().item() for name in fills} == fills


def variable_input(weighted=False):
    """Keys with 2, 3 and 1 bags, of which the 4 samples of the batch take some."""
    values = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8])
    inverse = torch.tensor([[0, 1, 1, 0], [2, 0, 1, 2], [0, 0, 0, 0]])
    return KeyedJaggedTensor(
        ["a", "b", "c"],
        values,
        torch.linspace(-1, 1, 8) if weighted else None,
        lengths=torch.tensor([2, 1, 0, 3, 1, 1]),
        stride_per_key=[2, 3, 1],
        inverse_indices=(["a", "b", "c"], inverse),
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_keys_with_batch_sizes_of_their_own(weighted):
    ebc, features = make_bags(is_weighted=weighted), variable_input(weighted)
    result = ebc(features)
    rows = dict(zip(*features.inverse_indices(), strict=True))
    for name, (table, feature) in zip(NAMES, READS, strict=True):
        jt = features[feature]
        bags = ebc.embedding_bags[table](jt.values(), jt.offsets(), jt.weights_or_none())
        assert torch.equal(result[name], bags[rows[feature]])


def test_keys_with_batch_sizes_of_their_own_train_like_the_full_batch():
    deduplicated, full = (fuse(make_bags(), optimizer=SGD(lr=0.1)) for _ in range(2))
    features = variable_input()
    rows = dict(zip(*features.inverse_indices(), strict=True))
    bags = {
        key: [features[key].to_dense()[row] for row in rows[key].tolist()]
        for key in features.keys()  # noqa: SIM118
    }
    expanded = KeyedJaggedTensor.from_jt_dict({key: JaggedTensor.from_dense(bags[key]) for key in bags})
    grad = torch.randn(4, 63)
    for ebc, batch in [(deduplicated, features), (full, expanded)]:
        ebc(batch).values().backward(grad)
    for one, other in zip(deduplicated.parameters(), full.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_sequences_of_keys_with_batch_sizes_of_their_own():
    ec, features = make_sequences(), variable_input()
    result = ec(features)
    assert result["b@t2"].lengths().tolist() == [0, 3, 1]
    assert torch.equal(result["b@t2"].values(), ec.embeddings["t2"](features["b"].values()))


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_gradients_are_those_of_plain_autograd(pooling):
    ebc, features = make_bags(pooling), make_input()
    grad = torch.randn(BATCH, 63)
    ours = gradients(ebc, (ebc(features).values() * grad).sum())
    plain = gradients(ebc, (loop_over_bags(ebc, features) * grad).sum())
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_of_sequences_are_those_of_plain_autograd():
    ec, features = make_sequences(), make_input()
    result = ec(features)
    grads = {name: torch.randn_like(jt.values()) for name, jt in result.items()}
    ours = gradients(ec, sum((jt.values() * grads[name]).sum() for name, jt in result.items()))
    looped = [
        (ec.embeddings[table](features[feature].values()) * grads[name]).sum()
        for name, (table, feature) in zip(NAMES, READS, strict=True)
    ]
    for one, other in zip(ours, gradients(ec, sum(looped)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_of_sample_weights(fused):
    ebc, features = make_bags(is_weighted=True), make_input(weighted=True)
    sample_weights = features.weights().requires_grad_()
    grad = torch.randn(BATCH, 63)
    (plain,) = torch.autograd.grad((loop_over_bags(ebc, features) * grad).sum(), sample_weights)
    if fused:
        fuse(ebc, optimizer=SGD(lr=0.1))
    ebc(features).values().backward(grad)
    torch.testing.assert_close(sample_weights.grad, plain)


def test_frozen_tables_get_no_gradient():
    ebc = make_bags()
    ebc.embedding_bags["t1"].requires_grad_(False)
    ebc(make_input()).values().sum().backward()
    assert [weight.grad is None for weight in ebc.parameters()] == [False, True, False]


def test_an_unfused_module_says_that_it_has_no_fused_optimizer():
    with pytest.raises(ValueError, match=r"meshrec.fuse"):
        _ = make_bags().fused_optimizer


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("name", ["t0", "t2"])
def test_weights_may_be_parametrized_or_given_by_a_functional_call(name):
    module, features = make_bags(), make_input()
    given = {f"embedding_bags.{name}.weight": 2 * module.embedding_bags[name].weight}
    by_call = torch.func.functional_call(module, given, (features,)).values()
    assert not torch.equal(by_call, module(features).values())
    torch.nn.utils.parametrize.register_parametrization(module.embedding_bags[name], "weight", Doubled())
    assert torch.equal(module(features).values(), by_call)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_torchscript_is_refused_with_what_to_do():
    config = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["f"])
    model = torch.nn.ModuleDict({"ebc": EmbeddingBagCollection([config])})
    for module in (model, model["ebc"]):
        with pytest.raises(ValueError, match=r"TorchScript.*EmbeddingBagCollection"):
            torch.jit.script(module)


BAG = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=2, feature_names=["f"])
ROWS = EmbeddingConfig(name="t", num_embeddings=4, embedding_dim=2, feature_names=["f"])


@pytest.mark.parametrize("kind", [EmbeddingBagCollection, EmbeddingCollection])
@pytest.mark.parametrize(
    ("tables", "given"),
    [
        (["t"], "'t'"),
        ("t", "'t'"),
        ([{"name": "t"}], "{'name': 't'}"),
        ({"t": None}, "a dict"),
        (None, "NoneType"),
        (BAG, "a EmbeddingBagConfig"),
    ],
)
def test_tables_must_be_a_list_of_configs(kind, tables, given):
    with pytest.raises(TypeError, match=f"{kind.__name__}.*{given}"):
        kind(tables)


@pytest.mark.parametrize(("kind", "config"), [(EmbeddingBagCollection, ROWS), (EmbeddingCollection, BAG)])
def test_a_collection_refuses_configs_of_the_other_kind(kind, config):
    with pytest.raises(TypeError, match=type(config).__name__):
        kind([config])


JAGGED = JaggedTensor(torch.ones(1), lengths=torch.tensor([1]))


@pytest.mark.parametrize("features", [{"f": JAGGED}, torch.ones(1), None, JAGGED])
@pytest.mark.parametrize("module", [EmbeddingBagCollection([BAG]), EmbeddingCollection([ROWS])])
def test_the_input_must_be_keyed(module, features):
    for model in (module, DistributedModelParallel(copy.deepcopy(module))):
        with pytest.raises(TypeError, match=f"KeyedJaggedTensor.*{type(features).__name__}"):
            model(features)
