"""Naive ops and compiled kernels against loops over Python lists, and the errors that both raise."""

import random
from itertools import chain
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from meshrec.ops import operators
from meshrec.ops.jagged import naive

IMPLEMENTATIONS = {"naive": naive, "op": operators}


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


@each_implementation
@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (torch.tensor([1.0]), "lengths_to_offsets.*int32.*int64"),
        (torch.ones(2, 2, dtype=torch.int64), "1 dimension.*2"),
        (torch.tensor([2**31 - 1, 1], dtype=torch.int32), "sum to 2147483648.*int64"),
    ],
)
def test_offsets_errors(ops, lengths, message):
    with pytest.raises(ValueError, match=message):
        ops.lengths_to_offsets(lengths)


@each_implementation
def test_offsets_reach_the_end_of_their_dtype(ops):
    lengths = torch.tensor([2**31 - 2, 1], dtype=torch.int32)
    same(ops.lengths_to_offsets(lengths), torch.tensor([0, 2**31 - 2, 2**31 - 1], dtype=torch.int32))
    same(ops.lengths_to_offsets(lengths.long() + 2), torch.tensor([0, 2**31, 2**31 + 3]))


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
        ({"lengths": torch.tensor([1.0])}, "permute_jagged.*int32.*int64"),
        ({"lengths": torch.tensor([[1]])}, "permute_jagged.*1 dimension.*2"),
        ({"lengths": torch.tensor([1, 2, 0, 2])}, "5.*4 values"),
        ({"lengths": torch.tensor([5, 2, 0, -3])}, "key 1.*-3.*0"),
        ({"lengths": torch.tensor([4, 0, 0])}, "3 bags.*among 2"),
        ({"num_keys": 0}, "4 bags.*among 0"),
        ({"num_keys": -1}, "num_keys.*0.*-1"),
        ({"values": torch.tensor(1)}, "1 dimension"),
        ({"weights": torch.ones(3)}, "3 weights.*match 4"),
        ({"weights": torch.tensor(1.0)}, "1 dimension"),
        ({"order": [2, 0]}, "key 2.*2 keys"),
        ({"order": [0, -1]}, "key -1.*2 keys"),
        ({"num_values": 3}, "hold 4.*num_values.*3"),
        ({"num_bags": 5}, "hold 4.*num_bags.*5"),
        ({"segments": torch.tensor([0, 2])}, "num_keys.*1.*3 elements.*2"),
        ({"segments": torch.tensor([0, 2, 4]).int()}, "int64.*CPU"),
        ({"segments": torch.tensor([0, 5, 4])}, "segments.*0.*4"),
        ({"segments": torch.tensor([1, 2, 4])}, "segments.*0.*4"),
        ({"segments": torch.tensor([0, 2, 3])}, "segments.*0.*4"),
    ],
)
def test_permute_errors(ops, change, message):
    with pytest.raises(ValueError, match=message):
        ops.permute_jagged(*{**PERMUTE, **change}.values())
