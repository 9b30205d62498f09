"""The lookup that finds rows in hash indexes as it reads: the kernel against plain torch, and against slots
that were found before.
"""

import pytest
import torch

from meshrec.ops import keyed, nbit
from meshrec.ops.index import HashIndex, mix, unmix
from meshrec.ops.keyed import naive
from meshrec.ops.tbe import LookupOptions, Lookups

NAMES = torch.tensor(list(b"a\tx\nb\ty\nfixed\tz\na\tw\n"), dtype=torch.uint8)
KINDS = [(torch.float32, 0), (torch.float16, 0), (torch.bfloat16, 0), (torch.uint8, 8), (torch.uint8, 4)]


def _rows(generator, count, dim, dtype, bits):
    numbers = torch.randn(count, dim, generator=generator)
    return nbit.quantize(numbers, bits) if bits else numbers.to(dtype)


def _batch(generator, kind, pooling, sizes=(3000, 40), num_bags=60):
    """Two hashed tables (the first with two features) and a fixed one; the IDs of each feature, all known."""
    (dtype, bits), dims = KINDS[kind], (16, 5)
    ids, indexes, weights = [], {}, []
    for t, (size, dim) in enumerate(zip(sizes, dims, strict=True)):
        drawn = torch.randint(-(1 << 63), (1 << 63) - 1, (size,), generator=generator).unique()
        index = HashIndex(10_000, seed=t)
        index.insert(mix(drawn, 7 + t).sort().values)
        ids.append(unmix(index.items()[0], 7 + t))
        indexes[t] = index, 7 + t
        weights.append(_rows(generator, index.num_slots, dim, dtype, bits))
    weights.append(torch.randn(50, 8, generator=generator))
    tables, dims = [0, 1, 2, 0], [16, 5, 8, 16]
    lengths = torch.randint(0, 30, (4, num_bags), generator=generator)
    lengths[:, ::11] = 0
    values = []
    for table, own in zip(tables, lengths.sum(1).tolist(), strict=True):
        known = ids[table] if table < 2 else torch.arange(50)
        values.append(known[torch.randint(len(known), (own,), generator=generator)])
    offsets = torch.cat([torch.tensor([0]), lengths.flatten().cumsum(0)])
    flat = pooling == 2
    scale = None if flat else torch.rand(int(offsets[-1]), generator=generator)
    lookups = Lookups(
        torch.cat(values), offsets, scale, None, 4, [0, 1, 2, 3], tables, [pooling] * 4, flat, dims
    )
    size = sum(len(each) * dim for each, dim in zip(values, dims, strict=True)) if flat else num_bags
    options = LookupOptions(size, torch.float32, True, NAMES)
    return [bits, bits, 0], indexes, weights, lookups, options


def _found_before(bits, indexes, weights, lookups, options):
    """What a lookup by slots gives."""
    values, ends = lookups.values.clone(), lookups.offsets[:: (len(lookups.offsets) - 1) // 4].tolist()
    for feature, table in enumerate(lookups.tables):
        if table in indexes:
            own = slice(ends[feature], ends[feature + 1])
            index, seed = indexes[table]
            values[own] = index.find(mix(values[own], seed))
    return nbit.forward(bits, weights, lookups._replace(values=values), options)


@pytest.mark.parametrize("pooling", [0, 1, 2])
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_the_kernel_equals_plain_torch_and_slots_found_before(kind, pooling, monkeypatch):
    arguments = _batch(torch.Generator().manual_seed(kind), kind, pooling)
    found = keyed.hashed_forward(*arguments)
    assert torch.equal(found, _found_before(*arguments))
    monkeypatch.setattr(keyed, "_hashed_forward", naive.hashed_forward)
    assert torch.allclose(keyed.hashed_forward(*arguments), found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [(1, 1), (2000, 3), (9000, 9000)])
def test_results_do_not_depend_on_threads(sizes):
    arguments = _batch(torch.Generator().manual_seed(5), 0, 0, sizes, num_bags=1000)
    expected, threads = _found_before(*arguments), torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            assert torch.equal(keyed.hashed_forward(*arguments), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("where", [0, 1, -1])
def test_an_id_without_a_slot_gives_none(where, monkeypatch):
    bits, indexes, weights, lookups, options = _batch(torch.Generator().manual_seed(6), 0, 0)
    values = lookups.values.clone()
    values[where] += 1
    for forward in (keyed._hashed_forward, naive.hashed_forward):
        monkeypatch.setattr(keyed, "_hashed_forward", forward)
        given = lookups._replace(values=values)
        assert keyed.hashed_forward(bits, indexes, weights, given, options) is None


def test_ids_outside_a_fixed_table_are_errors():
    bits, indexes, weights, lookups, options = _batch(torch.Generator().manual_seed(7), 0, 0)
    values = lookups.values.clone()
    values[lookups.offsets[2 * 60]] = 50
    with pytest.raises(ValueError, match=r"'fixed'.*id 50"):
        keyed.hashed_forward(bits, indexes, weights, lookups._replace(values=values), options)


def test_the_op_is_registered_whole():
    bits, indexes, weights, lookups, options = _batch(torch.Generator().manual_seed(8), 0, 0)
    memory = [tensor for index, _ in indexes.values() for tensor in index.kernel_tensors[0]]
    seeds = [seed for index, mix_seed in indexes.values() for seed in (index.kernel_tensors[1], mix_seed)]
    arguments = (weights, bits, *lookups, *options, list(indexes), memory, seeds)
    torch.library.opcheck(torch.ops.meshrec.hashed_forward.default, arguments)
