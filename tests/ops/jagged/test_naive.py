"""Naive ops and compiled kernels against loops over Python lists, and the errors that both raise."""

import bisect
import random
from itertools import chain
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from meshrec.ops.jagged import naive

IMPLEMENTATIONS = {"naive": naive, "op": torch.ops.meshrec}


class Case(NamedTuple):
    """``bags[k][b]``: the ids of bag b of key k."""

    bags: list[list[list[int]]]
    dtype: torch.dtype = torch.int64
    length_dtype: torch.dtype = torch.int64

    def lengths(self) -> Tensor:
        return torch.tensor([len(bag) for key in self.bags for bag in key], dtype=self.length_dtype)

    def values(self) -> Tensor:
        return torch.tensor([i for key in self.bags for bag in key for i in bag], dtype=self.dtype)

    def weights(self) -> Tensor:
        """Distinct numbers, so that a misplaced one is seen."""
        return torch.arange(self.values().numel(), dtype=torch.float32) + 0.5

    def segments(self) -> Tensor | None:
        """None where all keys have the same number of bags."""
        sizes = [len(key) for key in self.bags]
        if len(set(sizes)) <= 1:
            return None
        return torch.tensor([sum(sizes[:k]) for k in range(len(sizes) + 1)])


def random_case(seed: int, num_bags: list[int], *dtypes: torch.dtype, longest: int = 5) -> Case:
    rng = random.Random(seed)
    bags = [
        [[rng.randint(0, 99) for _ in range(rng.randint(0, longest))] for _ in range(n)] for n in num_bags
    ]
    return Case(bags, *dtypes)


CASES = {
    "no keys": Case([]),
    "no bags": Case([[], [], []]),
    "all bags empty": Case([[[], []], [[], []]]),
    "one id": Case([[[7]]]),
    "one id among empty bags": Case([[[], []], [[], [3]], [[], []]], torch.int32, torch.int64),
    "one key": random_case(1, [9]),
    "int32": random_case(2, [7] * 5, torch.int32, torch.int32),
    "int64 ids, int32 lengths": random_case(3, [7] * 5, torch.int64, torch.int32),
    "int32 ids, int64 lengths": random_case(4, [3] * 4, torch.int32, torch.int64),
    "variable batch": random_case(5, [3, 8, 1, 0, 5]),
    "variable batch, keys without bags": Case([[[1, 2], [3]], [], [[4]], []], torch.int32, torch.int32),
    "huge bag": random_case(6, [2, 2], longest=3000),
}

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
each_implementation = pytest.mark.parametrize("ops", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def flat(bags: list[list[list]]) -> list:
    return list(chain.from_iterable(chain.from_iterable(bags)))


def cut(numbers: list, bags: list[list[list]]) -> list[list[list]]:
    """``numbers``, one per id, in the shape of ``bags``."""
    source = iter(numbers)
    return [[[next(source) for _ in bag] for bag in key] for key in bags]


@each_implementation
@each_case
def test_offsets_are_running_sums(ops, case):
    lengths = case.lengths()
    expected = [sum(lengths.tolist()[:i]) for i in range(lengths.numel() + 1)]
    same(ops.lengths_to_offsets(lengths), torch.tensor(expected, dtype=case.length_dtype))


@each_implementation
@each_case
@pytest.mark.parametrize("choice", ["reversed", "halves swapped", "subset", "repeated", "nothing"])
def test_permute_moves_whole_keys(ops, case, choice):
    keys = list(range(len(case.bags)))
    order = {
        "reversed": keys[::-1],
        "halves swapped": keys[len(keys) // 2 :] + keys[: len(keys) // 2],
        "subset": keys[1::2],
        "repeated": [*keys, *keys[:1], *keys[-1:]],
        "nothing": [],
    }[choice]
    chosen = [case.bags[k] for k in order]
    moved_weights = [cut(case.weights().tolist(), case.bags)[k] for k in order]
    num_bags, num_values = sum(len(key) for key in chosen), len(flat(chosen))
    for weights in (None, case.weights()):
        lengths, values, new_weights = ops.permute_jagged(
            order,
            len(keys),
            case.lengths(),
            case.values(),
            weights,
            case.segments(),
            num_bags,
            num_values,
        )
        same(lengths, case._replace(bags=chosen).lengths())
        same(values, case._replace(bags=chosen).values())
        same(new_weights, torch.tensor([] if weights is None else flat(moved_weights)))


@each_implementation
def test_permute_moves_rows_of_any_width_and_dtype(ops):
    lengths, rows = torch.tensor([2, 1]), torch.arange(6, dtype=torch.float16).view(3, 2)
    moved = ops.permute_jagged([1, 0], 2, lengths, rows, torch.tensor([True, False, False]), None, 2, 3)
    same(moved[1], torch.tensor([[4, 5], [0, 1], [2, 3]], dtype=torch.float16))
    same(moved[2], torch.tensor([False, True, False]))
    no_width = ops.permute_jagged([1, 0], 2, lengths, rows[:, :0], None, None, 2, 3)
    assert no_width[1].shape == (3, 0)


@each_implementation
def test_inputs_may_be_strided(ops):
    lengths, values = torch.tensor([2, 9, 1, 9])[::2], torch.arange(6)[::2]
    assert not values.is_contiguous()
    same(ops.lengths_to_offsets(lengths), torch.tensor([0, 2, 3]))
    same(ops.permute_jagged([1, 0], 2, lengths, values, None, None, 2, 3)[1], torch.tensor([4, 0, 2]))
    boundaries = torch.tensor([[0, 3], [3, 5]]).T
    buckets = ops.bucketize_jagged(lengths, values, values.float(), None, boundaries)
    same(buckets[1], torch.tensor([0, 2, 1]))
    same(buckets[2], torch.tensor([0.0, 2.0, 4.0]))


INTERVALS = {
    "one bucket": lambda key: [0, 100],
    "even": lambda key: [0, 25, 50, 75, 100],
    "uneven by key": lambda key: [0, 3 + key, 40 + 2 * key, 100],
    "whole tables": lambda key: [0] * (key % 3 + 1) + [100] * (3 - key % 3),
    "below zero": lambda key: [-5, 1, 100],
}


@each_implementation
@each_case
@pytest.mark.parametrize("intervals", INTERVALS.values(), ids=INTERVALS.keys())
def test_bucketize_splits_every_bag(ops, case, intervals):
    bounds = [intervals(key) for key in range(len(case.bags))]
    num_buckets = len(intervals(0)) - 1
    boundaries = torch.tensor(bounds, dtype=torch.int64).view(len(bounds), num_buckets + 1)
    ids = [[[] for key in case.bags for bag in key] for _ in range(num_buckets)]
    sources = [[[] for key in case.bags for bag in key] for _ in range(num_buckets)]
    position, bag_index = 0, 0
    for key, bags in enumerate(case.bags):
        for bag in bags:
            for i in bag:
                bucket = bisect.bisect_right(bounds[key], i) - 1
                ids[bucket][bag_index].append(i - bounds[key][bucket])
                sources[bucket][bag_index].append(position)
                position += 1
            bag_index += 1
    for weights in (None, case.weights()):
        lengths, values, new_weights, positions = ops.bucketize_jagged(
            case.lengths(), case.values(), weights, case.segments(), boundaries
        )
        expected = case._replace(bags=ids)
        same(lengths, expected.lengths())
        same(values, expected.values())
        same(positions[torch.tensor(flat(sources), dtype=torch.int64)], torch.arange(position))
        expected_weights = torch.tensor([]) if weights is None else weights[flat(sources)]
        same(new_weights, expected_weights)


@each_implementation
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_bucketize_carries_weights_of_any_float_dtype(ops, dtype):
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=dtype)
    _, _, moved, _ = ops.bucketize_jagged(
        torch.tensor([3]), torch.tensor([5, 0, 6]), weights, None, torch.tensor([[0, 4, 8]])
    )
    same(moved, torch.tensor([2.0, 1.0, 3.0], dtype=dtype))


@each_implementation
@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (torch.tensor([1.0]), "lengths_to_offsets: lengths must be int32 or int64"),
        (torch.ones(2, 2, dtype=torch.int64), "lengths must have 1 dimension, got 2"),
    ],
)
def test_offsets_errors(ops, lengths, message):
    with pytest.raises(ValueError, match=message):
        ops.lengths_to_offsets(lengths)


PERMUTE = {
    "order": [1, 0],
    "num_keys": 2,
    "lengths": torch.tensor([1, 2, 0, 1]),
    "values": torch.arange(4),
    "weights": None,
    "segments": None,
    "num_bags": 4,
    "num_values": 4,
}


@each_implementation
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": torch.tensor([1.0])}, "permute_jagged: lengths must be int32 or int64"),
        ({"lengths": torch.tensor([[1]])}, "permute_jagged: lengths must have 1 dimension, got 2"),
        ({"lengths": torch.tensor([1, 2, 0, 2])}, "the lengths sum to 5, but there are 4 values"),
        ({"lengths": torch.tensor([5, 2, 0, -3])}, "the lengths of key 1 sum to -3; lengths are 0 or more"),
        ({"lengths": torch.tensor([4, 0, 0])}, "3 bags do not divide evenly among 2 keys; pass segments"),
        ({"num_keys": 0}, "4 bags do not divide evenly among 0 keys"),
        ({"num_keys": -1}, "num_keys must be 0 or more, got -1"),
        ({"values": torch.tensor(1)}, "values must have at least 1 dimension"),
        ({"weights": torch.ones(3)}, "3 weights do not match 4 values"),
        ({"weights": torch.tensor(1.0)}, "weights must have at least 1 dimension"),
        ({"order": [2, 0]}, "order names key 2; there are 2 keys"),
        ({"order": [0, -1]}, "order names key -1; there are 2 keys"),
        ({"num_values": 3}, "the keys in order hold 4 values, but num_values is 3"),
        ({"num_bags": 5}, "the keys in order hold 4 bags, but num_bags is 5"),
        ({"segments": torch.tensor([0, 2])}, r"segments must have num_keys \+ 1 = 3 elements, got 2"),
        ({"segments": torch.tensor([0, 2, 4]).int()}, "segments must be an int64 vector on the CPU"),
        ({"segments": torch.tensor([0, 5, 4])}, "segments must rise from 0 to the number of bags, 4"),
        ({"segments": torch.tensor([1, 2, 4])}, "segments must rise from 0 to the number of bags, 4"),
        ({"segments": torch.tensor([0, 2, 3])}, "segments must rise from 0 to the number of bags, 4"),
    ],
)
def test_permute_errors(ops, change, message):
    with pytest.raises(ValueError, match=message):
        ops.permute_jagged(*{**PERMUTE, **change}.values())


BUCKETIZE = {
    "lengths": torch.tensor([1, 2, 0, 1]),
    "values": torch.tensor([0, 9, 4, 7]),
    "weights": None,
    "segments": None,
    "boundaries": torch.tensor([[0, 5, 10], [3, 7, 8]]),
}


@each_implementation
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": torch.tensor([1.0])}, "bucketize_jagged: lengths must be int32 or int64"),
        ({"values": torch.ones(4)}, "bucketize_jagged: values must be int32 or int64"),
        ({"values": torch.ones(4, 1).long()}, "bucketize_jagged: values must have 1 dimension, got 2"),
        ({"lengths": torch.tensor([1, 2, 0, 2])}, "the lengths sum to 5, but there are 4 values"),
        ({"lengths": torch.tensor([1, 4, -2, 1])}, "the length of bag 2 is -2; lengths are 0 or more"),
        ({"weights": torch.ones(3)}, "weights must be one per value, got 3 for 4 values"),
        ({"weights": torch.ones(4).long()}, "weights must be floating point"),
        (
            {"boundaries": torch.ones(2, 3)},
            r"boundaries must be an int64 tensor \[num_keys, num_buckets \+ 1\]",
        ),
        ({"boundaries": torch.ones(2, 1).long()}, "boundaries must be an int64 tensor"),
        ({"boundaries": torch.tensor([[0, 5, 10], [3, 8, 7]])}, "the boundaries of key 1 must not fall"),
        ({"boundaries": torch.tensor([[0, 5, 10]] * 3)}, "4 bags do not divide evenly among 3 keys"),
        ({"values": torch.tensor([0, 10, 4, 7])}, r"id 10 of key 0 \(sample 1\) is outside \[0, 10\)"),
        ({"values": torch.tensor([0, 9, 4, 2])}, r"id 2 of key 1 \(sample 1\) is outside \[3, 8\)"),
        ({"values": torch.tensor([-1, 9, 4, 8])}, r"id -1 of key 0 \(sample 0\) is outside \[0, 10\)"),
        (
            {"segments": torch.tensor([0, 1, 4]), "values": torch.tensor([0, 7, 4, 9])},
            r"id 9 of key 1 \(sample 2\) is outside \[3, 8\)",
        ),
    ],
)
def test_bucketize_errors(ops, change, message):
    with pytest.raises(ValueError, match=message):
        ops.bucketize_jagged(*{**BUCKETIZE, **change}.values())
