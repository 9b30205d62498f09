import pytest
import torch

from meshrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from meshrec.models import HSTU, BERT4Rec, GRU4Rec, HistoryFeatures, ItemCatalogue, SampledSoftmax, SASRec

NUM_ITEMS, WIDTH = 30, 8


MODELS = ["sasrec", "hstu", "hstu with times", "gru4rec", "bert4rec"]
CAUSAL = MODELS[:4]
CLASSES = {"sasrec": SASRec, "hstu": HSTU, "gru4rec": GRU4Rec, "bert4rec": BERT4Rec}


def make_model(
    kind="sasrec",
    num_negatives=200,
    similarity="dot",
    item="next",
    items=None,
    seen="seen",
    repeats=False,
    **options,
):
    torch.manual_seed(0)
    table = EmbeddingConfig(
        name="items", num_embeddings=NUM_ITEMS, embedding_dim=WIDTH, feature_names=["history", "next"]
    )
    names = HistoryFeatures("history", item, seen, "times" if kind == "hstu with times" else None)
    softmax = SampledSoftmax(num_negatives=num_negatives, similarity=similarity, repeats=repeats)
    values = {"max_length": 6, "softmax": softmax, "items": items, **options}
    if kind == "bert4rec":
        values.setdefault("hidden", 0.0)
    return CLASSES[kind.split()[0]](EmbeddingCollection(tables=[table]), names, **values)


def features(history, following, seen=None, times=None):
    times = times or [[100 * place for place in range(len(each))] for each in history]
    bags = [*history, *following, *(seen or [[] for _ in history]), *times]
    return KeyedJaggedTensor(
        ["history", "next", "seen", "times"],
        torch.tensor([each for bag in bags for each in bag], dtype=torch.int64),
        lengths=torch.tensor([len(bag) for bag in bags]),
        stride=len(history),
    )


DENSE = torch.zeros(0, 0)


@pytest.mark.parametrize("kind", MODELS)
def test_histories_encoded_in_blocks_have_the_same_queries(kind, monkeypatch):
    model = make_model(kind).eval()
    lengths = torch.randint(0, 7, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    given = features([[(7 * n + k) % NUM_ITEMS for k in range(n)] for n in lengths], [[]] * 50)
    whole = model.query_vectors(given)
    monkeypatch.setattr("meshrec.models.history_model._ENCODED_BLOCK", 8)
    torch.testing.assert_close(model.query_vectors(given), whole)


@pytest.mark.parametrize("kind", MODELS)
def test_a_query_sees_the_whole_history_in_order_and_no_other(kind):
    model = make_model(kind).eval()
    (alone,) = model.query_vectors(features([[1, 2, 3]], [[]]))
    beside = model.query_vectors(features([[4], [1, 2, 3], []], [[], [], []]))
    assert torch.allclose(beside[1], alone, atol=1e-6)
    for other in ([2, 1, 3], [1, 2], [9, 1, 2, 3]):
        assert not torch.allclose(model.query_vectors(features([other], [[]]))[0], alone, atol=1e-3)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", MODELS)
def test_histories_of_any_lengths_are_encoded_as_alone(kind, seed):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 101, (12,), generator=draw) ** 2 // 100
    histories = [torch.randint(1, NUM_ITEMS, (int(each),), generator=draw).tolist() for each in lengths]
    model = make_model(kind, max_length=100).eval()
    together = model.query_vectors(features(histories, [[] for _ in histories]))
    alone = torch.cat([model.query_vectors(features([each], [[]])) for each in histories])
    assert torch.allclose(together, alone, atol=1e-5)
    weights = torch.randn(alone.shape, generator=draw)
    table = model.embedding_collection.embeddings["items"].weight
    gradients = [torch.autograd.grad((each * weights).sum(), table)[0] for each in (together, alone)]
    assert torch.allclose(*gradients, atol=1e-5)


def test_long_histories_are_not_padded_to_the_longest():
    model, shapes = make_model("sasrec", max_length=100), []
    model.blocks[0].register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape[:2])))
    model.query_vectors(features([[1] * 10, [1] * 100, [1] * 60, [1] * 40, []], [[]] * 5))
    assert shapes == [(2, 101), (1, 41), (2, 11)]


@pytest.mark.parametrize("kind", CAUSAL)
def test_positions_learn_from_what_is_before_them_only(kind):
    model = make_model(kind)
    whole = features([[1, 2, 3]], [[2, 3, 7]])
    changed = features([[1, 2, 9]], [[2, 3, 7]])
    encoded, other = (
        model.eval()._encode_rows(each, model._look_up(each, None)[0]).vectors for each in (whole, changed)
    )
    assert torch.allclose(encoded[:3], other[:3], atol=1e-6)
    assert not torch.allclose(encoded[3], other[3], atol=1e-3)


@pytest.mark.parametrize("kind", MODELS)
def test_the_place_is_that_among_all_unseen_items(kind):
    model = make_model(kind).eval()
    batch = features([[1, 2], [3], []], [[4], [5], [6]], [[1, 2], [3, 8], []])
    with torch.no_grad():
        found = model(DENSE, batch)
        products = model.query_vectors(batch) @ model.item_vectors().T
    for sample, (target, seen) in enumerate([(4, [1, 2]), (5, [3, 8]), (6, [])]):
        left = [item for item in range(NUM_ITEMS) if item not in seen]
        own = products[sample, target]
        assert found[sample, 1] == 1 + (products[sample, left] > own + 1e-6).sum()
        assert found[sample, 0] == pytest.approx(float(products[sample, left].logsumexp(0) - own), abs=1e-4)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_bf16_gives_nearly_the_losses_and_gradients_of_fp32(kind, training):
    batch = features([[1, 2, 3], [4, 5], [6]], [[2, 3, 7], [5, 8], [9]])
    losses, gradients = [], []
    for bf16 in (False, True):
        model = make_model(kind, dropout=0.0).train(training)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            out = model(DENSE, batch).float()
        losses.append(out[:, 0])
        if training:
            out[:, 0].sum().backward()
            gradients.append(model.embedding_collection.embeddings["items"].weight.grad)
    torch.testing.assert_close(losses[1], losses[0], rtol=0.02, atol=0.02)
    if training:
        assert (gradients[1] - gradients[0]).norm() < 0.05 * gradients[0].norm()


@pytest.mark.parametrize("similarity", ["dot", "cosine", "mixture"])
def test_only_items_of_the_catalogue_are_ranked_and_recommended(similarity):
    ids = torch.tensor([2, 3, 5, 7, 11, 13])
    model = make_model(items=ItemCatalogue(ids), similarity=similarity).eval()
    batch = features([[2, 4], []], [[5], [7]], [[2], []])
    with torch.no_grad():
        places = model(DENSE, batch)[:, 1]
        found = model.recommend(batch, 6)
        kept = model.recommend(batch, 6, keep_seen=True)
    assert (found.scores_BK[0] > float("-inf")).sum() == 5
    assert 2 not in found.ids_BK[0][:5]
    assert sorted(kept.ids_BK[0].tolist()) == ids.tolist()
    assert found.ids_BK[0].tolist().index(5) + 1 == places[0]
    assert found.ids_BK[1].tolist().index(7) + 1 == places[1]


def test_hidden_items_are_predicted_from_the_items_around_them():
    model = make_model("bert4rec", hidden=0.5)
    batch = features([[1, 2, 3], [4, 5]], [[2, 3, 7], [6]])
    chosen = set()
    for _ in range(60):
        found = model._select_targets(batch["history"], batch["next"])
        model.draws(found.ids_T)
        pairs = list(
            zip(found.sample_T.tolist(), found.position_T.tolist(), found.ids_T.tolist(), strict=True)
        )
        assert (0, 3, 7) in pairs
        assert (1, 2, 6) in pairs
        chosen |= {*pairs}
    assert chosen == {(0, 0, 1), (0, 1, 2), (0, 2, 3), (0, 3, 7), (1, 0, 4), (1, 1, 5), (1, 2, 6)}
    whole = torch.arange(5.0)[:, None].expand(5, WIDTH)
    rows = model._mask_history(JaggedTensor(whole, lengths=torch.tensor([3, 2])), found).values()
    hidden = {(sample, place) for sample, place, _ in pairs}
    for at, place in enumerate([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]):
        assert torch.equal(rows[at], model.start if place in hidden else whole[at])


@pytest.mark.parametrize("kind", MODELS)
def test_losses_of_training_come_close_to_those_of_all_items(kind):
    torch.manual_seed(0)
    model = make_model(kind, dropout=0.0, num_negatives=20_000)
    batch = features([[1, 2, 3]], [[4]])
    trained = model.train()(DENSE, batch)
    assert trained[0, 1] == 0
    assert trained[0, 0].item() == pytest.approx(model.eval()(DENSE, batch)[0, 0].item(), abs=0.02)


@pytest.mark.parametrize("kind", MODELS)
def test_a_sample_has_the_mean_of_its_targets(kind):
    model = make_model(kind, dropout=0.0, num_negatives=20_000)
    model.train()
    together = model(DENSE, features([[1, 2, 3]], [[2, 3, 4]]))[0, 0]
    # The same places from the end need the same history, so one target at a time is the last of a longer one.
    assert torch.isfinite(together)
    nothing = model(DENSE, features([[1], []], [[], []]))
    assert nothing.tolist() == [[0, 0], [0, 0]]
    nothing[:, 0].sum().backward()


@pytest.mark.parametrize("kind", MODELS)
def test_it_learns_a_circle(kind):
    torch.manual_seed(0)
    # It learns fewer targets of each sample, and each from more than the items before it.
    more, lr, num_steps = ({"hidden": 0.2}, 0.02, 800) if kind == "bert4rec" else ({}, 0.03, 80)
    model = make_model(kind, dropout=0.0, num_negatives=64, **more)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(num_steps):
        starts = torch.randint(0, NUM_ITEMS, (16,)).tolist()
        windows = [[(start + place) % NUM_ITEMS for place in range(5)] for start in starts]
        loss = model(DENSE, features([each[:-1] for each in windows], [each[1:] for each in windows]))[
            :, 0
        ].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    places = model.eval()(DENSE, features([[3, 4, 5], [28, 29]], [[6], [0]]))[:, 1]
    assert places.tolist() == [1, 1]


def test_what_does_not_fit():
    with pytest.raises(ValueError, match=r"sample 1.*7 items.*max_length.*6"):
        make_model()(DENSE, features([[1], [1] * 7], [[2], [3]]))
    with pytest.raises(ValueError, match=r"sample 1.*3 ids.*'next'.*1"):
        make_model()(DENSE, features([[1], [4]], [[2], [5, 6, 7]]))
    with pytest.raises(ValueError, match=r"'history'.*'other'.*0"):
        make_model(item="other")
    with pytest.raises(ValueError, match=r"num_heads.*3.*width 8"):
        make_model(num_heads=3)
    with pytest.raises(ValueError, match=r"sample 0.*2 items.*1 times.*'times'"):
        make_model("hstu with times")(DENSE, features([[1, 2]], [[3]], times=[[5]]))
    with pytest.raises(ValueError, match=r"num_layers.*0.*hidden_dim.*8.*1"):
        make_model("gru4rec", num_layers=0)
    with pytest.raises(ValueError, match=r"num_blocks.*0.*num_heads.*1.*1"):
        make_model("hstu", num_blocks=0)


def test_times_matter_where_they_are_read():
    near, far = (features([[1, 2, 3]], [[]], times=[[0, 1, last]]) for last in (2, 10**7))
    for kind, matters in (("hstu", False), ("hstu with times", True)):
        model = make_model(kind).eval()
        for block in model.blocks:
            if block.time_bias is not None:
                torch.nn.init.normal_(block.time_bias)
        assert torch.equal(model.query_vectors(near), model.query_vectors(far)) != matters


@pytest.mark.parametrize("similarity", ["dot", "cosine", "mixture"])
@pytest.mark.parametrize("kind", MODELS)
def test_users_without_a_history_get_the_items_with_the_best_scores_for_them(kind, similarity):
    ids = torch.arange(1, NUM_ITEMS)
    scores = torch.randn(len(ids), generator=torch.Generator().manual_seed(1))
    items = ItemCatalogue(ids, new_user_scores_I=scores)
    model = make_model(kind, similarity=similarity, items=items).eval()
    given = features([[], [1, 2]], [[], []], seen=[[int(ids[scores.argmax()])], []])
    best = model.recommend(given, 3)
    assert best.ids_BK[0].tolist() == ids[scores.argsort(descending=True)][1:4].tolist()
    assert torch.equal(best.scores_BK[0], scores.sort(descending=True).values[1:4])
    known = make_model(kind, similarity=similarity, items=ItemCatalogue(ids)).eval().recommend(given, 3)
    assert torch.equal(best.scores_BK[1], known.scores_BK[1])


def test_targets_of_users_without_a_history_are_ranked_by_their_scores():
    scores = torch.arange(NUM_ITEMS, dtype=torch.float32).log_softmax(0)
    items = ItemCatalogue(torch.arange(NUM_ITEMS), new_user_scores_I=scores)
    losses, ranks, ties = make_model(items=items).eval()(DENSE, features([[], []], [[29], [20]])).T
    assert ranks.tolist() == [1, 10]
    assert ties.tolist() == [0, 0]
    assert losses.tolist() == pytest.approx((-scores[[29, 20]]).tolist(), rel=1e-5)


@pytest.mark.parametrize("similarity", ["dot", "cosine", "mixture"])
def test_trends_are_added_to_the_scores_of_recommendations_and_ranks(similarity):
    ids, draw = torch.arange(1, NUM_ITEMS), torch.Generator().manual_seed(1)
    trends = torch.randn(len(ids), generator=draw)
    items = ItemCatalogue(ids, trends_I=trends, trend_weight=0.75)
    model = make_model("hstu", similarity=similarity, items=items, num_negatives=3).eval()
    given = features([[5, 7], [], [9, 3, 3]], [[4], [2], [29]])
    best = model.recommend(given, len(ids))
    plain = make_model("hstu", similarity=similarity, items=ItemCatalogue(ids)).eval()
    plain.load_state_dict(model.state_dict(), strict=False)
    scores = plain.similarity.score_matrix(plain.query_vectors(given), plain.item_vectors()) + 0.75 * trends
    expected = scores.sort(descending=True, dim=1)
    torch.testing.assert_close(best.scores_BK, expected.values)
    assert torch.equal(best.ids_BK, ids[expected.indices])
    losses, ranks, _ = model(DENSE, given).detach().T
    for sample, target in enumerate((4, 2, 29)):
        assert ranks[sample] == 1 + best.ids_BK[sample].tolist().index(target)
    torch.testing.assert_close(losses, -scores.log_softmax(1)[torch.arange(3), torch.tensor([3, 1, 28])])


def test_users_without_a_history_get_no_trends():
    ids, scores = torch.arange(NUM_ITEMS), torch.arange(NUM_ITEMS, dtype=torch.float32)
    items = ItemCatalogue(ids, new_user_scores_I=scores, trends_I=scores.flip(0), trend_weight=1.0)
    best = make_model(items=items).eval().recommend(features([[]], [[]]), 3)
    assert best.scores_BK.tolist() == [[29, 28, 27]]


def test_trends_of_repeated_items_are_part_of_the_similarity():
    ids, trends = torch.arange(NUM_ITEMS), torch.linspace(-2, 3, NUM_ITEMS)
    options = {"seen": None, "repeats": True}
    model = make_model(items=ItemCatalogue(ids, trends_I=trends, trend_weight=1.0), **options).eval()
    plain = make_model(items=ItemCatalogue(ids), **options).eval()
    for each in (model, plain):
        torch.nn.init.normal_(each.repeats.weight, generator=torch.Generator().manual_seed(1))
    given = features([[5, 7, 5]], [[7]])
    scores, without = (
        torch.zeros(1, NUM_ITEMS).scatter(1, best.ids_BK, best.scores_BK)[0]
        for best in (each.recommend(given, NUM_ITEMS) for each in (model, plain))
    )
    factors = torch.ones(NUM_ITEMS)
    factors[[5, 7]] = model.repeats.weight[0].detach()
    torch.testing.assert_close(scores, without + factors * trends)
    rank = 1 + int((scores > scores[7]).sum())
    assert model(DENSE, given)[0, 1] == rank
