"""Records of a file, and the clock of a cache: the kernels against plain Python."""

import os

import pytest
import torch

from meshrec.ops import records
from meshrec.ops.records import naive

DRAWS = 30


def drawn(number):
    draw = torch.Generator().manual_seed(number)

    def pick(low, high):
        return int(torch.randint(low, high, (1,), generator=draw))

    num_rows, first = pick(1, 300), pick(0, 1000)
    widths = [pick(1, 40) * 4, 4][: pick(1, 3)]
    record = sum(widths) + 4
    per_block = max(1, 512 // record)
    layout = records.RecordLayout(
        first, per_block, -(-per_block * record // 512) * 512, record, pick(0, 1 << 30)
    )
    parts = [
        torch.randn(num_rows + 5, width // 4, generator=draw)
        if width > 4
        else torch.randn(num_rows + 5, generator=draw)
        for width in widths
    ]
    count = pick(0, num_rows + 1)
    keys = torch.randperm(num_rows, generator=draw)[:count].sort().values + first
    slots = torch.randperm(num_rows + 5, generator=draw)[:count]
    return layout, parts, keys, slots, -(-num_rows // per_block) * layout.block_bytes


@pytest.fixture
def file(tmp_path):
    descriptor = os.open(tmp_path / "rows", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize(("in_flight", "ring"), [(0, False), (5, False), (5, True), (300, True)])
@pytest.mark.parametrize("number", range(DRAWS // 3))
def test_what_one_writes_the_other_reads(file, number, in_flight, ring):
    layout, parts, keys, slots, size = drawn(number)
    os.ftruncate(file, size)
    for first in (0, 1):
        own, places = keys[first::2].contiguous(), slots[first::2].contiguous()
        assert len(records.write(file, layout, own, parts, places, in_flight=in_flight, ring=ring)) == 0
    once = os.pread(file, size, 0)
    os.ftruncate(file, 0)
    os.ftruncate(file, size)
    assert len(naive.records_write(file, layout, keys, parts, slots, 0, False)) == 0
    assert os.pread(file, size, 0) == once
    read = [torch.zeros_like(part) for part in parts]
    plain = [torch.zeros_like(part) for part in parts]
    assert len(records.read(file, layout, keys, read, slots, in_flight=in_flight, ring=ring)) == 0
    assert len(naive.records_read(file, layout, keys, plain, slots, 0, False)) == 0
    for mine, theirs, part in zip(read, plain, parts, strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(mine[slots], part[slots])
        assert mine.count_nonzero() == part[slots].count_nonzero()


@pytest.mark.parametrize("number", range(4))
def test_damage_and_short_files_are_told(file, number):
    layout, parts, keys, slots, size = drawn(number + 3)
    keys, slots = keys[:20], slots[:20]
    os.ftruncate(file, size)
    assert len(records.write(file, layout, keys, parts, slots, in_flight=2)) == 0
    broken = len(keys) // 2
    key = int(keys[broken])
    position = layout.position(key) + layout.offset(key)
    byte = os.pread(file, 1, position)[0]
    os.pwrite(file, bytes([byte ^ 0x10]), position)
    for read in (records.read, lambda *a, in_flight: naive.records_read(*a, in_flight, True)):
        assert read(file, layout, keys, parts, slots, in_flight=3).tolist() == [[broken, records.DAMAGED]]
    os.ftruncate(file, layout.position(int(keys[-1])))
    causes = records.read(file, layout, keys[-1:], parts, slots[-1:], in_flight=1).tolist()
    assert causes == [[0, records.END_OF_FILE]]
    closed = os.dup(file)
    os.close(closed)
    assert records.write(closed, layout, keys[:1], parts, slots[:1], in_flight=1).tolist()[0][1] > 0


def test_a_row_in_the_place_of_another_is_damage(file):
    layout = records.RecordLayout(0, 1, 512, 12, 7)
    parts, one = [torch.ones(2, 2)], torch.tensor([0])
    records.write(file, layout, one, parts, one)
    os.pwrite(file, os.pread(file, 512, 0), 512)
    both = torch.tensor([0, 1])
    assert records.read(file, layout, both, parts, both).tolist() == [[1, records.DAMAGED]]


@pytest.mark.parametrize("number", range(DRAWS))
def test_slots_are_used_and_evicted_as_in_plain_python(number):
    draw = torch.Generator().manual_seed(number)
    size = int(torch.randint(1, 60, (1,), generator=draw))
    stamps = torch.randint(-1, 3, (size,), generator=draw)
    slots = torch.randint(-1, size, (80,), generator=draw)
    own, plain = stamps.clone(), stamps.clone()
    assert torch.equal(records.newly_used(slots, own, 2), naive.cache_used(slots, plain, 2))
    assert torch.equal(own, plain)
    counts = torch.randint(0, 4, (size,), generator=draw).to(torch.uint8)
    pins = torch.randint(-3, 2, (size,), generator=draw).clamp(min=0).int()
    hand = int(torch.randint(0, size, (1,), generator=draw))
    own, plain = counts.clone(), counts.clone()
    wanted = int(torch.randint(0, size + 3, (1,), generator=draw))
    free = int((pins == 0).sum())
    mine, hand_after = records.select_victims(own, pins, hand, wanted)
    theirs, other_hand = naive.cache_victims(plain, pins, hand, wanted)
    assert torch.equal(mine, theirs)
    assert len(mine) == min(wanted, free)
    if wanted <= free:
        assert hand_after == other_hand
        assert torch.equal(own, plain)


def test_arguments_that_make_no_sense_are_refused(file):
    layout = records.RecordLayout(0, 1, 512, 12, 0)
    parts, keys = [torch.ones(3, 2)], torch.tensor([0, 1])
    for bad, match in (
        ((layout, torch.tensor([1, 0]), parts, keys), "ascend"),
        ((layout, keys, parts, torch.tensor([0, 3])), "slot 3 is outside"),
        ((layout._replace(record_bytes=16), keys, parts, keys), "12, its record|8 bytes, its record 12"),
    ):
        with pytest.raises(ValueError, match=match):
            records.read(file, *bad)
