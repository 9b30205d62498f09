from types import SimpleNamespace

import pytest
import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor
from meshrec import distributed as md
from meshrec.models import BruteForceIndex, ItemFrequency, TowerRanking, TwoTower, in_batch_losses
from meshrec.models.trends import TrendScores
from meshrec.optim import SGD
from meshrec.testing import assert_equal_to_unsharded

NUM_USERS, NUM_ITEMS, BATCH = 6, 12, 4


def make_model():
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name="user", num_embeddings=NUM_USERS, embedding_dim=4, feature_names=["user"]),
        EmbeddingBagConfig(
            name="item", num_embeddings=NUM_ITEMS, embedding_dim=8, feature_names=["item", "history"]
        ),
    ]
    return TwoTower(
        EmbeddingBagCollection(tables=tables), ["user", "history"], ["item"], [16, 8], dense_in_features=2
    )


class Batch:
    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        users = torch.randint(0, NUM_USERS, (BATCH,), generator=generator)
        items = torch.randint(0, NUM_ITEMS, (3 * BATCH,), generator=generator)
        lengths = torch.tensor([1] * 2 * BATCH + [2] * BATCH)
        self.dense_features = torch.rand(BATCH, 2, generator=generator)
        self.sparse_features = KeyedJaggedTensor(
            ["user", "item", "history"], torch.cat([users, items]), lengths=lengths
        )
        self.labels = torch.tensor([1.0, 0.0, 1.0, 1.0])


def test_each_tower_sees_its_own_features():
    model, batch = make_model(), Batch(0)
    query, item = model(batch.dense_features, batch.sparse_features)
    assert torch.allclose(query.norm(dim=1), torch.ones(BATCH))
    users, items = batch.sparse_features.permute([0, 2]), batch.sparse_features.permute([1])
    assert torch.allclose(model.embed_queries(batch.dense_features, users), query)
    assert torch.allclose(model.embed_items(items), item)
    assert not torch.allclose(model.embed_queries(0 * batch.dense_features, users), query)


def test_the_softmax_is_over_the_items_of_the_batch():
    query, item = torch.rand(5, 3), torch.rand(5, 3)
    logits = query @ item.T / 0.5
    expected = -torch.log_softmax(logits, 1).diagonal()
    assert torch.allclose(in_batch_losses(query, item, temperature=0.5), expected)


def test_the_same_item_again_is_no_wrong_answer():
    query, item = torch.rand(3, 4), torch.rand(3, 4)
    item[2] = item[0]
    losses = in_batch_losses(query, item, temperature=1.0, item_ids_I=torch.tensor([5, 6, 5]))
    logits = query @ item.T
    first = -torch.log_softmax(logits[0, [0, 1]], 0)[0]
    middle = -torch.log_softmax(logits[1], 0)[1]
    last = -torch.log_softmax(logits[2, [1, 2]], 0)[1]
    assert torch.allclose(losses, torch.stack([first, middle, last]))


def test_log_q_makes_the_sampled_softmax_that_of_all_items():
    # With items drawn by q, the mean of exp(s - log q) over the draw is the sum of exp(s) over all items.
    torch.manual_seed(0)
    query, catalogue = torch.rand(1, 4), torch.rand(8, 4)
    q = torch.tensor([0.5, 0.2, 0.1, 0.05, 0.05, 0.04, 0.03, 0.03])
    drawn = torch.multinomial(q, 20_000, replacement=True)
    products = (query @ catalogue[drawn].T).squeeze() - q.log()[drawn]
    partition = products.exp().mean()
    assert torch.allclose(partition, (query @ catalogue.T).exp().sum(), rtol=0.03)
    ids = torch.tensor([0, 3, 5])
    corrected = in_batch_losses(query, catalogue[ids], temperature=1.0, log_q_I=q.log()[ids])
    expected = -torch.log_softmax((query @ catalogue[ids].T).squeeze() - q.log()[ids], 0)[0]
    assert torch.allclose(corrected, expected)


class InBatchTraining(torch.nn.Module):
    """Loss of the clicks in a batch, with or without a correction, and the query vectors."""

    def __init__(self, model, num_items=NUM_ITEMS, *, corrected=False, temperature=0.05):
        super().__init__()
        self.model, self.temperature = model, temperature
        self.frequency = ItemFrequency(num_items) if corrected else None

    def forward(self, batch):
        query, item = self.model(batch.dense_features, batch.sparse_features)
        ids = batch.sparse_features["item"].values().long()
        log_q = None if self.frequency is None else self.frequency(ids)
        losses = in_batch_losses(query, item, temperature=self.temperature, item_ids_I=ids, log_q_I=log_q)
        return (losses * batch.labels).sum() / batch.labels.sum(), query


def test_it_learns_who_likes_what():
    model = make_model()
    train = InBatchTraining(model)
    optimizer = torch.optim.Adam(train.parameters(), lr=0.02)
    batch = Batch(1)
    for _ in range(60):
        optimizer.zero_grad()
        loss, query = train(batch)
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    everything = KeyedJaggedTensor(["item"], torch.arange(NUM_ITEMS), lengths=torch.ones(NUM_ITEMS).long())
    index = BruteForceIndex(model.embed_items(everything))
    found = index.search(query, 1).ids_QK[:, 0]
    liked = batch.labels > 0
    in_batch = torch.isin(found, batch.sparse_features["item"].values())
    own = found == batch.sparse_features["item"].values()
    assert (own | ~in_batch)[liked].all()


def test_the_correction_makes_up_for_popularity():
    # Each user has clicked items of one kind; half of all clicks, of either kind, are of one popular item.
    torch.manual_seed(0)
    users, items, batch_size = 40, 60, 64
    chance = torch.full((2, items), 1e-9)
    chance[0, 1 : items // 2], chance[1, items // 2 :] = 1.0, 1.0
    chance /= 2 * chance.sum(1, keepdim=True)
    chance[:, 0] = 0.5
    tables = [
        EmbeddingBagConfig(name="user", num_embeddings=users, embedding_dim=8, feature_names=["user"]),
        EmbeddingBagConfig(name="item", num_embeddings=items, embedding_dim=8, feature_names=["item"]),
    ]
    ranks = {}
    for corrected in (True, False):
        torch.manual_seed(1)
        model = TwoTower(EmbeddingBagCollection(tables=tables), ["user"], ["item"], [16, 8])
        train = InBatchTraining(model, items, corrected=corrected, temperature=0.2)
        optimizer = torch.optim.Adam(train.parameters(), lr=0.02)
        for _ in range(150):
            user = torch.randint(0, users, (batch_size,))
            item = torch.multinomial(chance[user % 2], 1).squeeze(1)
            batch = SimpleNamespace(
                dense_features=torch.empty(batch_size, 0),
                sparse_features=KeyedJaggedTensor(
                    ["user", "item"],
                    torch.cat([user, item]),
                    lengths=torch.ones(2 * batch_size, dtype=torch.int64),
                ),
                labels=torch.ones(batch_size),
            )
            optimizer.zero_grad()
            train(batch)[0].backward()
            optimizer.step()
        every_item = KeyedJaggedTensor(["item"], torch.arange(items), lengths=torch.ones(items).long())
        every_user = KeyedJaggedTensor(["user"], torch.arange(users), lengths=torch.ones(users).long())
        products = model.embed_queries(torch.empty(users, 0), every_user) @ model.embed_items(every_item).T
        ranks[corrected] = (products > products[:, :1]).sum(1).float().mean()
    assert ranks[True] < 1 < ranks[False]


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_brute_force_finds_the_best(chunk):
    torch.manual_seed(0)
    vectors, query = torch.rand(50, 4), torch.rand(3, 4)
    ids = torch.randperm(1000)[:50]
    index = BruteForceIndex(vectors, ids, chunk=chunk)
    expected = (query @ vectors.T).topk(5, dim=1)
    found = index.search(query, 5)
    assert torch.equal(found.ids_QK, ids[expected.indices])
    assert torch.allclose(found.scores_QK, expected.values)
    seen = JaggedTensor(
        torch.cat([found.ids_QK[0, :2], torch.tensor([2000]), found.ids_QK[2, :1]]),
        lengths=torch.tensor([2, 1, 1]),
    )
    again = index.search(query, 4, exclude=seen).ids_QK
    assert torch.equal(again[0, :3], found.ids_QK[0, 2:])
    assert torch.equal(again[1], found.ids_QK[1, :4])
    assert torch.equal(again[2], found.ids_QK[2, 1:])


def test_compiles_without_a_graph_break():
    model, batch = make_model(), Batch(0)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    query, item = compiled(batch.dense_features, batch.sparse_features)
    expected = model(batch.dense_features, batch.sparse_features)
    assert torch.allclose(query, expected.query_BV)
    assert torch.allclose(item, expected.item_BV)


def make_train():
    return InBatchTraining(make_model())


def check_sharded():
    path = "model.embedding_bag_collection"
    builders = {"user": md.table_wise(rank=1), "item": md.row_wise()}
    plan = md.construct_module_sharding_plan(make_train().get_submodule(path), builders, world_size=2)
    assert_equal_to_unsharded(
        make_train,
        md.ShardingPlan({path: plan}),
        [[(Batch(2 * step),), (Batch(2 * step + 1),)] for step in range(3)],
        loss=lambda output: output[0],
        sharders=[md.EmbeddingBagCollectionSharder(SGD(lr=0.1))],
    )


def test_sharded_equals_unsharded(ranks):
    ranks(2).run(check_sharded)


def test_wrong_arguments():
    ebc = make_model().embedding_bag_collection
    with pytest.raises(ValueError, match=r"\['genre'\].*\['history', 'item', 'user'\]"):
        TwoTower(ebc, ["genre"], ["item"], [4, 4])
    with pytest.raises(ValueError, match=r"item_features.*\[\]"):
        TwoTower(ebc, ["user"], [], [4, 4])
    with pytest.raises(ValueError, match=r"3 vectors.*2 ids"):
        BruteForceIndex(torch.rand(3, 2), torch.arange(2))
    with pytest.raises(ValueError, match=r"k.*\[1, 3\].*4"):
        BruteForceIndex(torch.rand(3, 2)).search(torch.rand(1, 2), 4)


def test_ranked_items_have_their_trends_in_evaluation():
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=5, embedding_dim=4, feature_names=[name])
        for name in ("user", "item")
    ]
    towers = TwoTower(EmbeddingBagCollection(tables=tables), ["user"], ["item"], [8, 4])
    items, targets = torch.arange(5), [4, 1]
    catalogue = KeyedJaggedTensor(["item"], items, lengths=torch.ones(5, dtype=torch.int64))
    trends = TrendScores(items, torch.randn(5), 0.5)
    model = TowerRanking(towers, item="item", catalogue=catalogue, trends=trends).eval()
    given = KeyedJaggedTensor(
        ["user", "item"], torch.tensor([3, 0, *targets]), lengths=torch.ones(4, dtype=torch.int64)
    )
    dense = torch.empty(2, 0)
    expected = towers.embed_queries(dense, given) @ model.item_vectors().T / 0.05 + 0.5 * trends.trends_I
    best = model.recommend(given, 5)
    torch.testing.assert_close(best.scores_BK, expected.sort(descending=True, dim=1).values)
    losses, ranks, _ = model(dense, given).T
    torch.testing.assert_close(losses, -expected.log_softmax(1)[[0, 1], targets])
    assert ranks.tolist() == [
        1 + ids.index(target) for ids, target in zip(best.ids_BK.tolist(), targets, strict=True)
    ]
