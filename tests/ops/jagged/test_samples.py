"""Samples are permuted and concatenated: kernels and plain torch agree with each other and with lists."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrec.ops import jagged
from meshrec.ops.jagged import naive

NUM_KEYS = 3
BOTH = pytest.mark.parametrize("ops", [jagged, naive], ids=["kernel", "naive"])


def random_samples(seed, num, weighted=False):
    """The arguments of `permute_samples` after the order: fields, and IDs, codes of 64 and of 32 bits."""
    rng = torch.Generator().manual_seed(seed)
    fields = [torch.rand(num, 3, generator=rng), torch.rand(num, generator=rng), torch.arange(num)]
    values, offsets = [], []
    for dtype in (torch.int64, torch.int64, torch.int32):
        lengths = torch.randint(0, 4, (num,), generator=rng)
        start = int(torch.randint(0, 3, (), generator=rng))  # values before the first sample
        offsets.append(torch.cat([torch.tensor([start]), start + lengths.cumsum(0)]))
        values.append(torch.randint(-5, 30, (int(offsets[-1][-1]) + 2,), generator=rng).to(dtype))
    weights = [torch.rand(len(ids), generator=rng) for ids in values] if weighted else []
    tables = [torch.zeros(0, dtype=torch.int64), torch.randint(0, 99, (20,), generator=rng), torch.arange(40)]
    return fields, values, offsets, weights, tables, [0, -2, 3]


def bags(values, offsets, num):
    """The IDs per key and sample, as lists."""
    edges = offsets.tolist()
    flat = [values[a:b].tolist() for a, b in itertools.pairwise(edges)]
    return [flat[key * num : (key + 1) * num] for key in range(len(flat) // num if num else 0)]


def looked_up(code, table, first):
    position = code - first if 0 <= code - first < len(table) else len(table) - 1
    return int(table[position]) if len(table) else code


def assert_equal(actual, expected):
    for one, other in zip(actual[:-1], expected[:-1], strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert len(actual[-1]) == len(expected[-1])
    assert all(map(torch.equal, actual[-1], expected[-1]))


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.integers(0, 12), st.integers(0, 20), st.booleans())
def test_samples_are_permuted_and_looked_up(seed, num, count, weighted):
    samples = random_samples(seed, num, weighted)
    order = torch.randint(
        0, max(num, 1), (count if num else 0,), generator=torch.Generator().manual_seed(seed)
    )
    result = jagged.permute_samples(order, *samples)
    assert_equal(result, naive.permute_samples(order, *samples))
    fields, values, offsets, _, tables, firsts = samples
    ids, edges, _, permuted = result
    assert all(torch.equal(got, field[order]) for got, field in zip(permuted, fields, strict=True))
    for key, lists in enumerate(bags(ids, edges, len(order))):
        for got, row in zip(lists, order.tolist(), strict=True):
            codes = values[key][offsets[key][row] : offsets[key][row + 1]].tolist()
            assert got == [looked_up(code, tables[key], firsts[key]) for code in codes]


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.lists(st.integers(0, 9), min_size=1, max_size=4), st.booleans())
def test_ranges_of_samples_are_concatenated_key_by_key(seed, sizes, weighted):
    pieces = [
        jagged.permute_samples(torch.arange(size), *random_samples(seed + size, size, weighted))
        for size in sizes
    ]
    starts = [size // 3 for size in sizes]
    arguments = (
        starts,
        [max(start, size - 1) for start, size in zip(starts, sizes, strict=True)],
        NUM_KEYS,
        [field for fields in zip(*(piece[3] for piece in pieces), strict=True) for field in fields],
        *([piece[at] for piece in pieces] for at in (0, 1)),
        [piece[2] for piece in pieces] if weighted else [],
    )
    result = jagged.concat_samples(*arguments)
    assert_equal(result, naive.concat_samples(*arguments))
    values, lengths, _, totals, fields = result
    offsets = jagged.lengths_to_offsets(lengths)
    stops = arguments[1]
    for key, lists in enumerate(bags(values, offsets, len(fields[0]))):
        of_pieces = [
            bags(piece[0], piece[1], size)[key][start:stop]
            for piece, size, start, stop in zip(pieces, sizes, starts, stops, strict=True)
            if size
        ]
        assert lists == [ids for of_piece in of_pieces for ids in of_piece]
        assert int(totals[key]) == sum(map(len, lists))
    expected = [piece[3][0][a:b] for piece, a, b in zip(pieces, starts, stops, strict=True)]
    assert torch.equal(fields[0], torch.cat(expected))


def test_opcheck():
    samples, tests = random_samples(0, 4, weighted=True), ["test_schema", "test_faketensor"]
    order, registered = torch.tensor([3, 0]), torch.ops.meshrec
    torch.library.opcheck(registered.permute_samples.default, (order, *samples), test_utils=tests)
    values, offsets, weights, fields = jagged.permute_samples(order, *samples)
    arguments = ([0], [1], NUM_KEYS, fields, [values], [offsets], [weights])
    torch.library.opcheck(registered.concat_samples.default, arguments, test_utils=tests)


@BOTH
@pytest.mark.parametrize("order", [[0, 4], [-1]])
def test_an_order_names_samples(ops, order):
    with pytest.raises(ValueError, match=str(order[-1])):
        ops.permute_samples(torch.tensor(order), *random_samples(0, 4))


@BOTH
def test_offsets_lie_in_the_values(ops):
    samples = random_samples(0, 4)
    samples[2][1][2] = 1000
    with pytest.raises(ValueError, match="1000"):
        ops.permute_samples(torch.arange(4), *samples)
    values, offsets, _, fields = jagged.permute_samples(torch.arange(4), *random_samples(0, 4))
    with pytest.raises(ValueError, match="5"):
        ops.concat_samples([0], [5], NUM_KEYS, fields, [values], [offsets], [])
    with pytest.raises(ValueError, match="3"):
        ops.concat_samples([0], [4], NUM_KEYS, fields, [values[:3]], [offsets], [])


@BOTH
def test_lists_of_unequal_lengths_are_refused(ops):
    fields, values, offsets, weights, tables, firsts = random_samples(0, 4)
    with pytest.raises(ValueError, match="permute_samples"):
        ops.permute_samples(torch.arange(4), fields, values, offsets[:2], weights, tables, firsts)
    with pytest.raises(ValueError, match="permute_samples"):
        ops.permute_samples(torch.arange(3), [fields[0][:3]], values, offsets, weights, tables, firsts)
    with pytest.raises(ValueError, match="concat_samples"):
        ops.concat_samples([], [], NUM_KEYS, [], [], [], [])
