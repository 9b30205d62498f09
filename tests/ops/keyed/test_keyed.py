"""The lookup of raw IDs: the kernel against plain torch, and both against a table with a row for each ID."""

import pytest
import torch

from meshrec.ops import keyed, nbit
from meshrec.ops.index import mix, unmix
from meshrec.ops.initial_rows import uniform_rows
from meshrec.ops.keyed import naive
from meshrec.ops.tbe import LookupOptions, Lookups

EDGES = [-1, 0, 1, (1 << 63) - 1, -(1 << 63)]
NAMES = torch.tensor(list(b"items\titem\nfixed\tother\n"), dtype=torch.uint8)
TYPES = [(0, torch.float32), (0, torch.float16), (0, torch.bfloat16), (8, None), (4, None), (2, None)]


def _table(generator, num_rows, dim, bits, dtype, num_added):
    """A drawn table: how its rows are found, its rows, and what each known ID reads."""
    seed, first = int(torch.randint(1 << 40, (1,), generator=generator)), keyed.UniformInit(5, -0.5, 0.25)
    ids = torch.randint(-(1 << 62), 1 << 62, (num_rows + num_added,), generator=generator)
    ids[: min(3, num_rows)] = torch.tensor(EDGES[: min(3, num_rows)])
    ids = ids.unique()[torch.randperm(len(ids.unique()), generator=generator)]

    def rows(count):
        numbers = torch.randn(count, dim, generator=generator)
        return nbit.quantize(numbers, bits) if bits else numbers.to(dtype)

    keys = mix(ids[:num_rows], seed).sort().values
    weight = rows(len(keys))
    added_keys = mix(ids[num_rows:], seed).sort().values
    slots = torch.randperm(len(added_keys) + 2, generator=generator)[: len(added_keys)]
    found = keyed.KeyIndex(
        keyed.pack_buckets(keys),
        torch.stack([added_keys, slots]),
        rows(len(added_keys) + 2),
        seed,
        first,
    )
    return found, weight, ids


def _lookups(values, offsets, tables, dims, pooling, *, flat, sample_weights=None):
    features = len(tables)
    return Lookups(
        values, offsets, sample_weights, None, features, list(range(features)), tables, pooling, flat, dims
    )


@pytest.mark.parametrize("num_rows", [0, 1, 7, 8, 9, 1000])
@pytest.mark.parametrize("kind", range(len(TYPES)))
def test_the_kernel_equals_plain_torch(kind, num_rows):
    bits, dtype = TYPES[kind]
    generator = torch.Generator().manual_seed(100 * kind + num_rows)
    for flat, pooling in ((False, 0), (False, 1), (True, 2)):
        dim, batch, num_added = (13, 16, 64)[kind % 3], 9, num_rows // 3
        found, weight, ids = _table(generator, num_rows, dim, bits, dtype, num_added)
        lengths = torch.randint(0, 40, (2 * batch,), generator=generator)
        offsets = torch.cat([torch.tensor([0]), lengths.cumsum(0)])
        values = torch.randint(-(1 << 63), (1 << 63) - 1, (int(offsets[-1]),), generator=generator)
        is_known = torch.rand(len(values), generator=generator) < 0.7
        if len(ids):
            chosen = ids[torch.randint(len(ids), (len(values),), generator=generator)]
            values = torch.where(is_known, chosen, values)
        values[:5] = torch.tensor(EDGES)
        values[int(offsets[batch]) :] %= 50  # the second feature reads a fixed table
        fixed = torch.randn(50, 8, generator=generator)
        weights = None if pooling == 2 else torch.randn(len(values), generator=generator)
        lookups = _lookups(
            values, offsets, [1, 0], [dim, 8], [pooling, pooling], flat=flat, sample_weights=weights
        )
        size = (
            sum(int(lengths[i * batch : (i + 1) * batch].sum()) * d for i, d in enumerate((dim, 8)))
            if flat
            else batch
        )
        options = LookupOptions(size, torch.float32, True, NAMES)
        arguments = ([0, bits], {1: found}, [fixed, weight], lookups, options)
        got = keyed.forward(*arguments)
        plain = _plainly(*arguments)
        assert torch.equal(got, plain) if pooling == 2 else torch.allclose(got, plain, rtol=1e-5, atol=1e-5)
        assert torch.equal(got, _as_fixed(*arguments))


RUN = """
import sys, torch
from meshrec.ops import keyed
calls = torch.load(sys.argv[1], weights_only=False)
torch.save([keyed.forward(*each) for each in calls], sys.argv[2])
"""


def test_every_instruction_set_finds_the_same_rows(run_code, tmp_path):
    generator = torch.Generator().manual_seed(3)
    calls, expected = [], []
    for num_rows in (0, 1, 5, 8, 9, 5000):
        found, weight, ids = _table(generator, num_rows, 4, 0, torch.float32, num_rows // 5)
        for size, kind in ((1, torch.int64), (9, torch.int32), (1999, torch.int64), (1999, torch.int32)):
            values = torch.randint(-(1 << 31), 1 << 31, (size,), generator=generator)
            if kind is torch.int64:
                values = torch.cat([ids, values])[torch.randperm(len(ids) + size, generator=generator)]
            lookups = _lookups(values.to(kind), torch.arange(len(values) + 1), [0], [4], [2], flat=True)
            options = LookupOptions(4 * len(values), torch.float32, True, NAMES)
            calls.append(([0], {0: found}, [weight], lookups, options))
            expected.append(_plainly(*calls[-1][:3], lookups._replace(values=values), options))
    torch.save(calls, tmp_path / "calls.pt")
    for isa in ("baseline", "avx2", "avx512"):
        run_code(RUN, tmp_path / "calls.pt", tmp_path / f"{isa}.pt", MESHREC_ISA=isa)
        assert all(map(torch.equal, torch.load(tmp_path / f"{isa}.pt"), expected))


def _plainly(bits, keyed_tables, weights, lookups, options):
    """What naive.py gives."""
    before, kept = keyed._forward, []
    try:
        keyed._forward = naive.keyed_forward
        return keyed.forward(bits, keyed_tables, weights, lookups, options)
    finally:
        keyed._forward = before
        kept.clear()


def _keys(buckets, num_rows):
    """The keys of buckets, in order."""
    of_row = {}
    for first, *keys in buckets.tolist():
        of_row |= {row: key for row, key in enumerate(keys, first) if row < num_rows}
    return [of_row[row] for row in range(num_rows)]


def _as_fixed(bits, keyed_tables, weights, lookups, options):
    """What a fixed table gives whose rows are those that the IDs read, one after the other."""
    (number, found), ends = next(iter(keyed_tables.items())), lookups.offsets[9]
    ids = lookups.values[:ends]
    by_id = dict(zip(_keys(found.buckets, len(weights[number])), weights[number], strict=True))
    by_id |= {int(key): found.added_rows[int(slot)] for key, slot in found.added_keys.T}
    rows = []
    for id_, key in zip(ids, mix(ids, found.seed).tolist(), strict=True):
        first = uniform_rows(
            id_[None],
            seed=found.initial_values.seed,
            low=found.initial_values.low,
            high=found.initial_values.high,
            columns=(0, lookups.dims[0]),
        )
        first = nbit.quantize(first, bits[number]) if bits[number] else first.to(weights[number].dtype)
        rows.append(by_id.get(key, first[0]))
    table = torch.stack(rows) if rows else weights[number][:0]
    values = lookups.values.clone()
    values[:ends] = torch.arange(len(rows))
    return nbit.forward(bits, [weights[0], table], lookups._replace(values=values), options)


EXTREME = {
    "begin alike": torch.cat([torch.arange(1000), torch.tensor([1 << 62])]),
    "all at the end": (1 << 63) - 1 - torch.arange(500).flip(0),
    "all at the beginning": torch.arange(500) - (1 << 63),
    "both ends": torch.tensor([-(1 << 63), (1 << 63) - 1]),
    "seven": torch.arange(7),
    "eight": torch.arange(8),
}


@pytest.mark.parametrize("kind", EXTREME)
def test_keys_that_lie_together_are_found(kind):
    keys = EXTREME[kind]
    buckets = keyed.pack_buckets(keys)
    assert _keys(buckets, len(keys)) == keys.tolist()
    none = torch.empty(2, 0, dtype=torch.int64)
    weight = torch.arange(len(keys), dtype=torch.float32)[:, None] + 1
    found = keyed.KeyIndex(buckets, none, weight[:0], 3, keyed.UniformInit(0, 0.0, 0.0))
    others = torch.tensor([-5, 1000, (1 << 62) + 1, -(1 << 63) + 600, (1 << 63) - 600])
    values = torch.cat([unmix(keys, 3), unmix(others, 3)])
    lookups = _lookups(values, torch.arange(len(values) + 1), [0], [1], [2], flat=True)
    options = LookupOptions(len(values), torch.float32, True, NAMES)
    got = keyed.forward([0], {0: found}, [weight], lookups, options)
    assert torch.equal(got, torch.cat([weight[:, 0], torch.zeros(len(others))]))


@pytest.mark.parametrize("num_keys", [0, 1, 6, 7, 8, 9, 100, 12345])
def test_buckets_have_all_keys_from_their_homes_on(num_keys):
    keys = torch.randint(-(1 << 63), (1 << 63) - 1, (num_keys,)).unique()
    buckets = keyed.pack_buckets(keys)
    assert _keys(buckets, len(keys)) == keys.tolist()
    homes = naive.num_home_buckets(len(keys))
    assert homes <= len(buckets) <= homes + 8
    firsts = buckets[:, 0].tolist()
    for row, key in enumerate(keys.tolist()):
        home = ((key + (1 << 63)) * homes) >> 64
        assert firsts[home] <= row
    others = torch.cat([keys + 1, keys - 1, torch.tensor(EDGES)])
    expected = {key: row for row, key in enumerate(keys.tolist())}
    for each in (keys, others):
        assert keyed.find_rows(buckets, len(keys), each).tolist() == [
            expected.get(k, -1) for k in each.tolist()
        ]


@pytest.mark.parametrize(
    "damage", ["first beyond the rows", "negative", "buckets", "words", "added row", "dtype"]
)
def test_keys_that_do_not_fit_are_errors(damage):
    generator = torch.Generator().manual_seed(1)
    found, weight, ids = _table(generator, 100, 4, 0, torch.float32, 10)
    buckets, added = found.buckets.clone(), found.added_keys.clone()
    if damage == "first beyond the rows":
        buckets[:, 0] = 1000
    elif damage == "negative":
        buckets[:, 0] = -7
    elif damage == "buckets":
        buckets = buckets[: naive.num_home_buckets(100) - 1]
    elif damage == "words":
        buckets = buckets[:, :-1]
    elif damage == "dtype":
        buckets = buckets.double()
    else:
        added[1] = 1 << 40
    found = found._replace(buckets=buckets, added_keys=added)
    lookups = _lookups(ids, torch.arange(len(ids) + 1), [0], [4], [2], flat=True)
    options = LookupOptions(4 * len(ids), torch.float32, True, NAMES)
    with pytest.raises(ValueError, match=r"damaged|fit together|no added row|int64"):
        keyed.forward([0], {0: found}, [weight], lookups, options)


def test_buckets_that_lead_nowhere_end_the_search():
    keys = torch.arange(1000) << 53
    buckets = keyed.pack_buckets(keys)
    buckets[:, 1:] = -(1 << 63)  # each key seems to lie further on
    none, weight = torch.empty(2, 0, dtype=torch.int64), torch.ones(1000, 1)
    found = keyed.KeyIndex(buckets, none, weight[:0], 3, keyed.UniformInit(0, 0.0, 0.0))
    values = unmix(keys, 3)
    lookups = _lookups(values, torch.arange(len(values) + 1), [0], [1], [2], flat=True)
    options = LookupOptions(len(values), torch.float32, True, NAMES)
    got = keyed.forward([0], {0: found}, [weight], lookups, options)
    assert torch.equal(got, torch.zeros(1000))


def test_the_number_of_threads_changes_nothing():
    generator = torch.Generator().manual_seed(2)
    found, weight, ids = _table(generator, 5000, 24, 8, None, 500)
    values = ids[torch.randint(len(ids), (60_000,), generator=generator)]
    values[::7] = torch.arange(len(values[::7]))
    lookups = _lookups(values, torch.arange(0, 60_001, 20), [0], [24], [0], flat=False)
    options = LookupOptions(3000, torch.float32, True, NAMES)
    results, threads = [], torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            results.append(keyed.forward([8], {0: found}, [weight], lookups, options))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(each, results[0]) for each in results)


def test_the_op_is_registered_whole():
    generator = torch.Generator().manual_seed(3)
    found, weight, ids = _table(generator, 50, 8, 0, torch.float32, 5)
    arguments = ([weight], [0], ids, torch.arange(len(ids) + 1), None, None, 1, [0], [0], [0], False, [8])
    rest = (len(ids), torch.float32, True, NAMES, [0], list(found[:3]))
    last = ([found.seed, found.initial_values.seed], [-0.5, 1e-8])
    torch.library.opcheck(torch.ops.meshrec.keyed_forward.default, (*arguments, *rest, *last))
