"""The ranker of HSTU layers: candidates do not see each other, and cached histories change nothing."""

import pytest
import torch

from meshrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from meshrec.models import HSTURanker, RankerFeatures

FEATURES = RankerFeatures(
    contextual=("user", "city"),
    history=("past", "past_kind"),
    candidates=("item", "kind"),
    actions=("action",),
    times="times",
)
TABLES = {"user": ["user"], "city": ["city"], "items": ["past", "item"], "kinds": ["past_kind", "kind"]}
TABLES["action"] = ["action"]
HISTORIES, CANDIDATES = [[1, 2, 3, 4], [], [5]], [[7, 8, 9], [1], [2, 3]]


def made(features=FEATURES, **options):
    torch.manual_seed(0)
    configs = [
        EmbeddingConfig(name=name, num_embeddings=10, embedding_dim=4 + at, feature_names=names)
        for at, (name, names) in enumerate(TABLES.items())
    ]
    values = {"num_labels": 2, "max_length": 5, "max_candidates": 3, "width": 8, "num_heads": 2, **options}
    model = HSTURanker(EmbeddingCollection(tables=configs), features, **values).eval()
    for block in model.blocks:
        if block.time_bias is not None:
            torch.nn.init.normal_(block.time_bias)
    torch.nn.init.normal_(model.target)
    return model


def batch(histories=HISTORIES, candidates=CANDIDATES, **changed):
    users = [[at] for at in range(len(histories))]
    times = [
        [100 * place**3 for place in range(len(past))] + [9000 + 50 * each for each in own]
        for past, own in zip(histories, candidates, strict=True)
    ]
    kinds = [[(each * 3) % 10 for each in bag] for bag in (*histories, *candidates)]
    bags = {
        "user": users,
        "city": users,
        "past": histories,
        "past_kind": kinds[: len(histories)],
        "action": [[each % 2 for each in past] for past in histories],
        "item": candidates,
        "kind": kinds[len(histories) :],
        "times": times,
        **changed,
    }
    return KeyedJaggedTensor(
        list(bags),
        torch.tensor(
            [each for feature in bags.values() for bag in feature for each in bag], dtype=torch.int64
        ),
        lengths=torch.tensor([len(bag) for feature in bags.values() for bag in feature]),
        stride=len(histories),
    )


def logits(model, *bags):
    return model.logits(batch(*bags))


@torch.no_grad()
@pytest.mark.parametrize("features", [FEATURES, FEATURES._replace(contextual=(), actions=(), times=None)])
def test_a_candidate_is_scored_as_if_it_were_alone(features):
    model = made(features)
    together = logits(model)
    assert together.shape == (6, 2)
    alone = [
        logits(model, [HISTORIES[sample]], [[each]]) for sample, own in enumerate(CANDIDATES) for each in own
    ]
    if features.contextual:  # sample 0 alone has user 0, the others have users of their own
        alone = alone[:3]
    torch.testing.assert_close(together[: len(alone)], torch.cat(alone))


@torch.no_grad()
@pytest.mark.parametrize("features", [FEATURES, FEATURES._replace(contextual=(), actions=(), times=None)])
def test_kept_histories_change_nothing(features):
    model = made(features)
    cache = model.encode_prefix(batch())
    torch.testing.assert_close(model.score(batch(), cache), logits(model), rtol=1e-5, atol=1e-5)
    others = [[4], [5, 6], []]
    found = model.score(batch(HISTORIES, others), cache)
    torch.testing.assert_close(found, logits(model, HISTORIES, others), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_sample_has_the_logits_of_its_last_candidate_and_samples_that_fill_up_have_zeros():
    model, bags = (
        made(),
        batch([*HISTORIES, []], [*CANDIDATES, []], user=[[0], [1], [2], []], city=[[0], [1], [2], []]),
    )
    found = model(torch.zeros(0, 0), bags)
    torch.testing.assert_close(found, torch.cat([logits(model)[[2, 3, 5]], torch.zeros(1, 2)]))


def test_bf16_gives_nearly_the_logits_and_gradients_of_fp32():
    exact, rounded = made(), made()
    expected = logits(exact)
    with torch.autocast("cpu", torch.bfloat16):
        found = logits(rounded)
    assert found.dtype == torch.float32  # bf16 logits would have ties
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03)
    for values in (expected, found):
        values.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in exact.named_parameters()}
    for name, parameter in rounded.named_parameters():
        assert (parameter.grad - gradients[name]).norm() <= 0.05 * gradients[name].norm(), name


@torch.no_grad()
def test_everything_that_is_read_matters():
    model, expected = made(), logits(made())
    bags = batch().to_dict()
    for name in bags:
        if name in ("item", "kind"):
            continue
        changed = [each.tolist() for each in bags[name].to_dense()]
        changed[0][0] = changed[0][0] + 1 if name != "times" else -(10**6)
        other = model.logits(batch(**{name: changed}))
        assert not torch.allclose(other[:3], expected[:3], atol=1e-4), name
        assert torch.equal(other[3:], expected[3:]), name


def test_it_learns_what_the_history_says():
    torch.manual_seed(0)
    model = made(FEATURES._replace(times=None), num_labels=1, dropout=0.0).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(40):
        pairs = torch.randint(0, 5, (64, 2), generator=torch.Generator().manual_seed(step)).tolist()
        given = batch(
            [[past] for past, _ in pairs], [[item] for _, item in pairs], user=[[0]] * 64, city=[[0]] * 64
        )
        labels = torch.tensor([float(past % 2) for past, _ in pairs])
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(None, given)[:, 0], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"city": [[1], [1, 2], [1]]}, "sample 1.*2.*IDs.*'city'.*1"),
        ({"action": [[1], [], [1]]}, "sample 0.*1.*IDs.*'action'.*4"),
        ({"kind": [[1], [1], [1, 2]]}, "sample 0.*1.*IDs.*'kind'.*3"),
        (
            {"times": [[1] * 7, [1], [1]]},
            "sample 2.*1 times.*1 items.*2 candidates",
        ),
    ],
)
def test_bags_that_do_not_fit_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        made()(torch.zeros(0, 0), batch(**change))


def test_sizes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"4 items.*max_length.*3"):
        logits(made(max_length=3))
    with pytest.raises(ValueError, match=r"sample 0.*3 candidates.*max_candidates.*2"):
        logits(made(max_candidates=2))
    with pytest.raises(ValueError, match=r"\['nothing'\]"):
        made(FEATURES._replace(contextual=("nothing",)))
    with pytest.raises(ValueError, match=r"rows.*\[6\].*\[7\]"):
        made(FEATURES._replace(history=("past",), candidates=("kind",)))
