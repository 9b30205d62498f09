import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrec.data import Position, StreamReader, streaming

from .streams import Numbered, covered, epoch, numbers


@pytest.fixture(scope="module", params=[0, streaming.MAX_CACHED_VALUES], ids=["read", "cached"], autouse=True)
def max_cached_values(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "MAX_CACHED_VALUES", request.param)
        yield request.param


def reader(sizes, **options):
    return StreamReader(Numbered(sizes), **({"seed": 3, "window": 5, "lanes": 4} | options))


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


sizes = st.lists(st.integers(0, 23), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) > 0)


@settings(max_examples=20)
@given(sizes, st.integers(1, 9), st.integers(1, 5), st.integers(1, 7), st.integers(1, 9))
def test_an_epoch_is_every_sample_once_whatever_the_ranks(sizes, batch, world, lanes, window):
    both = {"lanes": lanes, "window": window}
    steps = epoch(reader(sizes, **both), batch, world)
    assert sorted(flat(covered(steps))) == list(range(sum(sizes)))
    assert covered(steps) == covered(epoch(reader(sizes, **both), batch * world))


@settings(max_examples=20)
@given(sizes, st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(0, 5), st.integers(1, 5))
def test_a_position_resumes_exactly_on_any_number_of_ranks(sizes, batch, world, other, done, lanes):
    whole = covered(epoch(reader(sizes, lanes=lanes), batch, world, Position(2, 0)))
    position = Position(2, min(done * batch * world, sum(sizes)))
    rest = flat(whole[done:])
    resumed = covered(epoch(reader(sizes, lanes=lanes), batch, world, position))
    assert resumed == whole[done:]
    elsewhere = covered(epoch(reader(sizes, lanes=lanes), batch, other, position))
    assert sorted(flat(elsewhere)) == sorted(rest)


def test_the_order_depends_on_seed_and_epoch_only():
    first = covered(epoch(reader([40, 30]), 8))
    assert first == covered(epoch(reader([40, 30]), 8))
    assert first != covered(epoch(reader([40, 30], seed=4), 8))
    assert first != covered(epoch(reader([40, 30]), 8, position=Position(1, 0)))


def test_blocks_and_rows_are_shuffled_or_not():
    (one,) = epoch(reader([20, 20, 20], lanes=1, window=20), 60)
    order = numbers(one[0])
    assert order != sorted(order)
    assert [number // 20 for number in order[::20]] != [0, 1, 2]
    (one,) = epoch(reader([20, 20, 20], lanes=1, window=20, shuffle=False), 60)
    assert numbers(one[0]) == list(range(60))


def test_a_rank_reads_its_own_blocks_only():
    blocks = []
    for rank in range(2):
        source = Numbered([16] * 8)
        list(StreamReader(source, seed=0, window=8, lanes=4).batches(8, rank=rank, world_size=2))
        blocks.append(set(source.opened))
    assert not blocks[0] & blocks[1]
    assert blocks[0] | blocks[1] == set(range(8))


def test_resuming_opens_only_what_is_left():
    source = Numbered([10] * 10)
    list(StreamReader(source, seed=0, window=5, lanes=1).batches(10, position=Position(0, 70)))
    assert len(source.opened) == 3


def test_later_epochs_do_not_read_a_small_source_again(max_cached_values):
    source = Numbered([10, 7])
    batches = StreamReader(source, seed=0, window=5, lanes=4)
    first = covered(epoch(batches, 4))
    num_opened = len(source.opened)
    assert covered(epoch(batches, 4)) == first
    covered(epoch(batches, 4, position=Position(1, 0)))
    assert (len(source.opened) == num_opened == 2) == (max_cached_values > 0)


def test_all_ranks_have_as_many_batches_and_the_last_may_be_dropped():
    steps = epoch(reader([21]), 4, 2)
    assert [[len(batch) for batch in step] for step in steps] == [[4, 4], [4, 4], [2, 3]]
    assert [len(batch) for batch in reader([21]).batches(4, world_size=2, drop_last=True)] == [4, 4]
    from_3 = reader([21]).batches(4, world_size=2, drop_last=True, position=Position(0, 3))
    assert [len(batch) for batch in from_3] == [4, 4]
    assert [[len(batch) for batch in step] for step in epoch(reader([1]), 4, 2)] == [[0, 1]]


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"batch_size.*1.*0"):
        reader([5]).batches(0)
    with pytest.raises(ValueError, match=r"rank 2.*world_size.*2"):
        reader([5]).batches(1, rank=2, world_size=2)
    with pytest.raises(ValueError, match=r"epoch=0.*sample=6.*5"):
        reader([5]).batches(1, position=Position(0, 6))
    with pytest.raises(ValueError, match="samples"):
        reader([0])
    with pytest.raises(ValueError, match=r"window 0.*lanes 4"):
        reader([5], window=0)
    with pytest.raises(ValueError, match=r"seed.*0.*-1"):
        reader([5], seed=-1)
