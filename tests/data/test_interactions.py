import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from meshrec.data import DataError, Feature, Interactions, Ranges, interactions, next_items
from meshrec.data.next_item_data import latest
from meshrec.data.order import Stream, generator

NUM_USERS, LENGTH, NUM_ITEMS, FIRST = 30, 14, 24, 2


def circle(**more) -> Interactions:
    """Users that go through the items in a circle; item n has the ID n + 2."""
    users = np.repeat(np.arange(NUM_USERS), LENGTH)
    place = np.tile(np.arange(LENGTH), NUM_USERS)
    values = {
        "name": "circle",
        "offsets": np.arange(NUM_USERS + 1) * LENGTH,
        "items": (5 * users + place) % NUM_ITEMS + FIRST,
        "times": 100 * place + users,
        "rows": np.arange(len(users)),
        "num_rows": len(users),
        "item": Feature(name="item", num_embeddings=NUM_ITEMS + FIRST),
        "catalogue": np.arange(NUM_ITEMS) + FIRST,
    }
    return Interactions(**{**values, **more})


def bags(batch, key):
    return [bag.tolist() for bag in batch.sparse[key].to_dense()]


def whole(reader):
    (batch,) = reader.batches(10_000)
    return batch


def test_the_last_two_of_each_user_are_held_out():
    data = next_items(circle(), history=5)
    validation, test = whole(data.validation), whole(data.test)
    assert len(validation) == len(test) == NUM_USERS
    for history, target, seen, times, seen_later in zip(
        *(bags(validation, key) for key in ("history", "item", "seen", "times")),
        bags(test, "seen"),
        strict=True,
    ):
        assert len(seen) == LENGTH - 2
        assert history == seen[-5:]
        assert seen_later == seen + target
        assert np.diff(times).tolist() == [100] * 4
    assert (data.item, data.seen, data.times) == ("item", "seen", "times")


def test_a_sample_of_users_is_evaluated_and_all_are_trained_on():
    data, sampled = next_items(circle(), history=5), next_items(circle(), history=5, evaluated_users=7)
    assert data.num_held_out == {}
    assert sampled.num_held_out == {"validation": NUM_USERS, "test": NUM_USERS}
    assert len(whole(sampled.train)) == len(whole(data.train))
    for part, full in ((sampled.validation, data.validation), (sampled.test, data.test)):
        seen, all_seen = bags(whole(part), "seen"), bags(whole(full), "seen")
        indices = [all_seen.index(bag) for bag in seen]
        assert len(indices) == 7
        assert indices == sorted(set(indices))
    with pytest.raises(ValueError, match=r"evaluated_users.*0"):
        next_items(circle(), history=5, evaluated_users=0)


@pytest.mark.parametrize("history", [1, 5, 11, 50])
def test_windows_hold_every_pair_of_neighbours_once(history):
    data = next_items(circle(), history=history)
    train = whole(data.train)
    pairs = []
    for sequence, targets, seen in zip(
        *(bags(train, key) for key in ("history", "item", "seen")), strict=True
    ):
        assert 1 <= len(sequence) == len(targets) <= history
        assert sequence[1:] == targets[:-1]
        assert seen == []
        pairs += zip(sequence, targets, strict=True)
    expected = [pair for seen in bags(whole(data.validation), "seen") for pair in itertools.pairwise(seen)]
    assert sorted(pairs) == sorted(expected)
    counts = np.bincount([target for _, target in pairs], minlength=NUM_ITEMS + FIRST)[FIRST:]
    assert data.item_counts.tolist() == counts.tolist()


def test_single_items_know_who_had_them_and_what_they_are():
    genre, of_items = Feature(name="genre", num_embeddings=3), np.arange(NUM_ITEMS) % 3
    values = Ranges(of_items, np.arange(NUM_ITEMS), np.ones(NUM_ITEMS, np.int64))
    log = circle(
        user=Feature(name="user", num_embeddings=NUM_USERS + 1),
        user_ids=np.arange(NUM_USERS) + 1,
        described={"genre": (genre, values)},
    )
    data = next_items(log, history=4, windows=False)
    train = whole(data.train)
    assert len(train) == NUM_USERS * (LENGTH - 3)
    for (item,), (kind,), history in zip(
        *(bags(train, key) for key in ("item", "genre", "history")), strict=True
    ):
        assert kind == (item - FIRST) % 3
        assert history[-1] == (item - FIRST - 1) % NUM_ITEMS + FIRST
        assert 1 <= len(history) <= 4
    assert {user for (user,) in bags(train, "user")} == {*range(1, NUM_USERS + 1)}
    assert data.catalogue["item"].values().tolist() == [*range(FIRST, NUM_ITEMS + FIRST)]
    assert data.catalogue["genre"].values().tolist() == of_items.tolist()


def test_by_time_each_user_is_tested_on_the_first_item_after_a_moment():
    log = circle()
    data = next_items(log, history=50, held_out="time", validation=0.2, test=0.2)
    ordered = np.sort(log.times)
    begin, end = ordered[int(len(ordered) * 0.6)], ordered[int(len(ordered) * 0.8)]
    for reader, moment in ((data.validation, begin), (data.test, end)):
        batch = whole(reader)
        assert len(batch) == NUM_USERS
        for user, (target, seen) in enumerate(zip(bags(batch, "item"), bags(batch, "seen"), strict=True)):
            interactions = slice(*log.offsets[user : user + 2])
            own = log.items[interactions].tolist()
            before = int((log.times[interactions] < moment).sum())
            assert seen == own[:before]
            assert target == own[before : before + 1]
    assert max(max(times) for times in bags(whole(data.train), "times")) < begin


def stored(folder, log: Interactions) -> Interactions:
    """Return the log with its arrays in read-only files of 32-bit integers."""
    for name in ("items", "times", "rows"):
        np.save(folder / f"{name}.npy", getattr(log, name).astype(np.int32))
    return replace(log, **{name: np.load(folder / f"{name}.npy", "r") for name in ("items", "times", "rows")})


def random_log(random, num_users=12) -> Interactions:
    lengths = random.integers(0, 9, num_users)
    offsets, catalogue = np.cumsum([0, *lengths]), np.sort(random.choice(90, 8, replace=False))
    num, users = offsets[-1], np.repeat(np.arange(num_users), lengths)
    times = random.integers(-20, 60, num)
    return circle(
        offsets=offsets,
        items=random.choice(catalogue, num),
        times=times[np.lexsort((times, users))],
        rows=random.permutation(num),
        num_rows=int(num),
        item=Feature(name="item", num_embeddings=90),
        catalogue=catalogue,
    )


def plain_samples(log, history, held_out, *, windows):
    """Return (position of the last target, history, targets) of training, validation and test samples."""
    train, validation, test = [], [], []
    ordered = np.sort(log.times)
    start, end = (ordered[int(len(ordered) * share)] for share in (1 - 0.3 - 0.2, 1 - 0.2))
    for first, stop in itertools.pairwise(log.offsets.tolist()):
        indices, train_stop = range(first, stop), stop
        if held_out == "leave_last_out" and stop - first >= 3:
            train_stop = stop - 2
            validation.append(stop - 2)
            test.append(stop - 1)
        if held_out == "time":
            train_stop = first + sum(log.times[index] < start for index in indices)
            validation += [index for index in indices if start <= log.times[index] < end][:1]
            test += [index for index in indices if log.times[index] >= end][:1]
        train += range(train_stop - 1, first, -history) if windows else range(first + 1, train_stop)
    samples = []
    for part, indices in enumerate((train, validation, test)):
        samples.append([])
        for index in indices:
            first = max(log.offsets[np.searchsorted(log.offsets, index, side="right") - 1], index - history)
            first_target = first + 1 if windows and part == 0 else index
            samples[part].append(
                (log.items[first:index].tolist(), log.items[first_target : index + 1].tolist())
            )
    return samples


@pytest.mark.parametrize("held_out", ["leave_last_out", "time", "nothing"])
@pytest.mark.parametrize("windows", [True, False])
def test_samples_are_those_of_loops_over_users(monkeypatch, held_out, windows):
    monkeypatch.setattr(interactions, "BLOCK", 7)
    random = np.random.default_rng(0)
    for history in (1, 2, 5):
        log = random_log(random)
        data = next_items(
            log, history=history, held_out=held_out, validation=0.3, test=0.2, windows=windows, seed=3
        )
        expected = plain_samples(log, history, held_out, windows=windows)
        order = generator(3, Stream.BLOCKS, 0).permutation(len(expected[0]))
        expected[0] = [expected[0][number] for number in order]
        for reader, samples in zip((data.train, data.validation, data.test), expected, strict=True):
            batches = [] if reader is None else [whole(reader)]
            pairs = [
                zip(*(bags(batch, key) for key in ("history", "item")), strict=True) for batch in batches
            ]
            assert [*itertools.chain(*pairs)] == samples
        counts = np.bincount([item for _, targets in expected[0] for item in targets], minlength=90)
        assert data.item_counts.tolist() == counts[log.catalogue].tolist()


def test_four_ranks_read_the_samples_of_one():
    data = next_items(circle(), history=5)
    for reader in (data.train, data.validation):
        steps = zip(*(reader.batches(2, rank=rank, world_size=4) for rank in range(4)), strict=True)
        for whole_step, step in zip(reader.batches(8), steps, strict=True):
            assert bags(whole_step, "history") == [bag for batch in step for bag in bags(batch, "history")]
            assert whole_step.rows.tolist() == [row for batch in step for row in batch.rows.tolist()]


@pytest.mark.parametrize("options", [{}, {"held_out": "time"}, {"windows": False}, {"held_out": "nothing"}])
def test_logs_in_mapped_files_give_the_same_batches(tmp_path, options):
    log = circle()
    mapped = stored(tmp_path, log)
    datasets = [next_items(each, history=5, **options) for each in (log, mapped)]
    readers = [(data.train, data.validation, data.test) for data in datasets]
    latest_items = [latest(each, np.array([3, -1, 0]), history=5) for each in (log, mapped)]
    for in_memory, from_files in zip(
        [*readers[0], latest_items[0]], [*readers[1], latest_items[1]], strict=True
    ):
        if in_memory is not None:
            expected, batch = whole(in_memory), whole(from_files)
            assert torch.equal(batch.sparse.values(), expected.sparse.values())
            assert torch.equal(batch.sparse.lengths(), expected.sparse.lengths())
            assert torch.equal(batch.rows, expected.rows)
    assert torch.equal(datasets[0].item_counts, datasets[1].item_counts)
    assert options.get("windows") is False or torch.equal(*(data.new_user_scores for data in datasets))


def test_seen_items_stay_candidates_where_that_is_wanted():
    data = next_items(circle(), history=5, exclude_seen=False)
    assert data.seen is None
    assert "seen" not in whole(data.test).sparse.keys()  # noqa: SIM118


def test_the_latest_items_of_users():
    log = circle()
    batch = whole(latest(log, np.array([3, -1, 0]), history=5))
    own = log.items[slice(*log.offsets[3:5])].tolist()
    assert bags(batch, "history") == [own[-5:], [], log.items[:LENGTH].tolist()[-5:]]
    assert bags(batch, "seen") == [own, [], log.items[:LENGTH].tolist()]
    assert bags(batch, "item") == [[], [], []]


def test_too_few_items_and_wrong_arguments():
    short = circle(
        offsets=np.array([0, 2, 3]), items=np.array([2, 3, 4]), times=np.arange(3), rows=np.arange(3)
    )
    with pytest.raises(DataError, match="three"):
        next_items(short, history=5)
    with pytest.raises(ValueError, match=r"history.*1.*0"):
        next_items(circle(), history=0)
    with pytest.raises(ValueError, match=r"validation 0.0.*test 0.1.*above 0"):
        next_items(circle(), history=5, held_out="time", validation=0.0)
