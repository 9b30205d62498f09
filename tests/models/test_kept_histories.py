"""Histories of HSTU that are encoded step by step, from cached keys and values, against whole histories."""

import pytest
import torch

from meshrec.models import TokenCache
from tests.models.test_history_models import features, make_model

LONGEST = 30
HISTORIES = [[1, 2, 3, 4, 5], [6], [], [7, 8, 9]]
TIMES = [[0, 5, 90, 4000, 4001], [3], [], [100, 100, 9000]]


def nothing(model, num_samples):
    return TokenCache.empty(model.cache_shape, num_samples)


def cut(bags, sizes):
    return [bag[:size] for bag, size in zip(bags, sizes, strict=True)]


@pytest.fixture(params=["hstu", "hstu with times"])
def model(request):
    made = make_model(request.param, num_blocks=3, num_heads=2, max_length=LONGEST).eval()
    for block in made.blocks:
        if block.time_bias is not None:
            torch.nn.init.normal_(block.time_bias)
        torch.nn.init.normal_(block.position_bias)
    return made


def batch(sizes):
    histories = cut(HISTORIES, sizes)
    return features(histories, [[] for _ in histories], times=cut(TIMES, sizes))


@pytest.mark.parametrize(
    "steps",
    [[(5, 1, 0, 3)], [(0, 0, 0, 0), (1, 1, 0, 1), (5, 1, 0, 3)], [(3, 1, 0, 3), (3, 1, 0, 3), (4, 1, 0, 3)]],
)
@torch.no_grad()
def test_steps_equal_the_whole_history(model, steps):
    cache = nothing(model, len(HISTORIES))
    for sizes in steps:
        query, cache = model.advance(batch(sizes), cache)
        torch.testing.assert_close(query, model.query_vectors(batch(sizes)), rtol=1e-5, atol=1e-5)
        assert cache.lengths_B.tolist() == list(sizes)


@torch.no_grad()
def test_a_history_that_grows_alone_equals_the_whole_history_and_is_seldom_copied(model):
    drawn = torch.Generator().manual_seed(0)
    items = torch.randint(1, 9, (LONGEST,), generator=drawn).tolist()
    times = torch.randint(10**6, (LONGEST,), generator=drawn).sort().values.tolist()
    cache, lengths, places = nothing(model, 1), [0, 0, 1, 1, *range(2, LONGEST - 3), LONGEST], set()
    for length in lengths:
        asked = features([items[:length]], [[]], times=[times[:length]])
        query, cache = model.advance(asked, cache)
        places.add(cache.rows.data_ptr())
        torch.testing.assert_close(query, model.query_vectors(asked), rtol=1e-5, atol=1e-5)
    assert len(places) <= 4


@torch.no_grad()
def test_another_end_of_the_same_beginning_does_not_meet_the_first_one(model):
    def asked(*items):
        return features([[*items]], [[]], times=[[*range(0, 1000 * len(items), 1000)]])

    cache = model.advance(asked(1, 2, 3), nothing(model, 1)).cache
    for end in (asked(1, 2, 3, 4, 5), asked(1, 2, 3, 6), asked(1, 2, 3)):
        found = model.advance(end, cache).query_BV
        torch.testing.assert_close(found, model.query_vectors(end), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_only_new_items_are_looked_up(model):
    _, cache = model.advance(batch((4, 1, 0, 2)), nothing(model, 4))
    looked_up = []
    model.embedding_collection.register_forward_pre_hook(lambda _, given: looked_up.append(given[0].values()))
    model.advance(batch((5, 1, 0, 3)), cache)
    # The last item that was there before is encoded again: its result depends on the time of the next one.
    assert looked_up[0].tolist() == [4, 5, 6, 8, 9]


@torch.no_grad()
def test_more_kept_tokens_than_items_are_refused(model):
    _, cache = model.advance(batch((4, 1, 0, 2)), nothing(model, 4))
    with pytest.raises(ValueError, match=r"sample 0.*caches 4.*3 items"):
        model.advance(batch((3, 1, 0, 2)), cache)
