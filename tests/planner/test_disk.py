"""Which tables stay in memory, the caches of the others, and the hit rates that are predicted for them."""

import dataclasses

import pytest
import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, FileRows, Hashed
from meshrec.ops import records
from meshrec.planner import Disk, IdSample, Table, Topology, place_rows, plan_tables, tables_of_model
from meshrec.planner.disk import _CACHE_ROW_OVERHEAD, exponent_of, hit_rate
from meshrec.tables.cached.cache import slot_bytes


def zipf(num_rows, exponent, draws, seed=0):
    law = torch.arange(1, num_rows + 1, dtype=torch.float64).pow(-exponent).cumsum(0)
    generator = torch.Generator().manual_seed(seed)
    return torch.searchsorted(law, torch.rand(draws, generator=generator, dtype=torch.float64) * law[-1])


def sample_of(ids):
    return IdSample(len(ids), len(ids.unique()))


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.05, 1.4])
def test_the_exponent_of_a_sample_is_found(exponent):
    assert exponent_of(50_000, sample_of(zipf(50_000, exponent, 40_000))) == pytest.approx(exponent, abs=0.05)


@pytest.mark.parametrize("exponent", [0.6, 1.05])
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_the_predicted_hit_rate_is_near_that_of_the_cache(exponent, share):
    num_rows, batch, cached = 5_000, 300, int(5_000 * share)
    slot_of = torch.full((num_rows,), -1)
    key_of = torch.full((cached,), -1)
    counts, pins = torch.zeros(cached, dtype=torch.uint8), torch.zeros(cached, dtype=torch.int32)
    hand = hits = rows = 0
    for step in range(150):
        keys = zipf(num_rows, exponent, batch, seed=step + 1).unique()
        slots = slot_of[keys]
        here = slots[slots >= 0]
        pins.zero_()
        pins[here] = 1
        counts[here] = (counts[here] + 1).clamp(max=3)
        found, hand = records.select_victims(counts, pins, hand, int((slots < 0).sum()))
        old = key_of[found]
        slot_of[old[old >= 0]] = -1
        key_of[found], slot_of[keys[slots < 0]] = keys[slots < 0], found
        if step >= 75:
            hits, rows = hits + len(here), rows + len(keys)
    predicted = hit_rate(num_rows, cached, sample_of(zipf(num_rows, exponent, 20_000)), batch)
    assert hits / rows == pytest.approx(predicted, abs=0.06)


TABLES = [
    Table(name="large", num_embeddings=4_000_000, embedding_dim=64),
    Table(name="even", num_embeddings=1_000_000, embedding_dim=64),
    Table(name="small", num_embeddings=1_000, embedding_dim=64),
]
SAMPLES = {
    "large": IdSample(100_000, 40_000),
    "even": IdSample(100_000, 95_000),
    "small": IdSample(100_000, 1_000),
}


def place(memory, disk, tables=TABLES, samples=SAMPLES):
    topology = Topology(world_size=2, compute_device="cpu", ddr_cap=memory, reserve=0.0, disk=disk)
    return place_rows(tables, topology, samples, batch_size=4096)


def test_memory_goes_where_it_saves_reads():
    plan = place(200 << 20, Disk(num_bytes=8 << 30, reads=70_000, writes=50_000))
    large, even, small = plan.tables
    assert small.cache_rows is None
    assert small.file_bytes == 0
    shares = {"large": 4_000_000, "even": 1_000_000}
    total = large.memory_bytes + even.memory_bytes
    in_proportion = 0.0
    for name, rows in shares.items():
        cached = int(total * rows / sum(shares.values()) / 294)
        in_proportion += 8192 * (1 - hit_rate(rows, cached, SAMPLES[name], 8192))
    assert large.reads + even.reads < 0.7 * in_proportion
    assert sum(each.memory_bytes for each in plan.tables) <= 400 << 20
    assert sum(each.memory_bytes for each in plan.tables) > 340 << 20
    assert plan.disk_seconds == pytest.approx(
        sum(each.reads for each in plan.tables) * (1 / 70_000 + 1 / 50_000)
    )
    assert "large" in plan.text()
    assert all(
        each.cache_rows is None for each in place(8 << 30, Disk(num_bytes=1, reads=1, writes=1)).tables
    )


@pytest.mark.parametrize("dim", [16, 1024])
def test_a_table_is_whole_in_memory_where_it_fits_and_takes_no_more_than_there_is(dim):
    table = Table(name="t", num_embeddings=100_000, embedding_dim=dim)
    kept = []
    for share in (0.97, 0.985, 0.99, 0.995, 1.0, 1.02):
        memory = int(share * table.num_bytes / 2)
        disk = Disk(num_bytes=8 << 30, reads=70_000, writes=50_000)
        (placed,) = place(memory, disk, [table], {"t": IdSample(100_000, 40_000)}).tables
        assert placed.memory_bytes <= 2 * memory
        kept.append(placed.cache_rows is None)
    assert kept[-1]
    assert not kept[0]


@pytest.mark.parametrize(
    ("memory", "disk", "samples", "match"),
    [
        (1 << 30, None, SAMPLES, "topology"),
        (1 << 20, Disk(num_bytes=1 << 40), SAMPLES, "batches"),
        (200 << 20, Disk(num_bytes=1 << 20, reads=1, writes=1), SAMPLES, "table files"),
        (200 << 20, Disk(num_bytes=1 << 40), SAMPLES, "measured"),
        (200 << 20, Disk(num_bytes=1 << 40), {}, "'large'.*IDs"),
    ],
)
def test_what_cannot_be_placed_is_named(memory, disk, samples, match):
    with pytest.raises(ValueError, match=match):
        place(memory, disk, samples=samples)


def test_the_index_of_hashed_keys_stays_in_memory(tmp_path):
    plain, hashed = (
        place(200 << 20, Disk(num_bytes=8 << 30, reads=70_000, writes=50_000), tables=[table, *TABLES[1:]])
        for table in (TABLES[0], dataclasses.replace(TABLES[0], index_bytes=16))
    )
    one, other = plain.tables[0], hashed.tables[0]
    assert one.file_bytes == other.file_bytes
    index = 16 * 4_000_000
    for each, own in ((one, 0), (other, index)):
        row = slot_bytes(TABLES[0].num_bytes // 4_000_000)
        assert each.memory_bytes - own == pytest.approx(each.cache_rows * row, rel=0.01)
    config = EmbeddingBagConfig(
        name="t",
        embedding_dim=64,
        feature_names=["f"],
        keys=Hashed(max_rows=1_000_000),
        storage=FileRows(path=tmp_path, cache_rows=100_000),
    )
    (table,) = tables_of_model(EmbeddingBagCollection([config], device="meta"))
    whole = 256 + table.index_bytes
    assert table.in_memory == pytest.approx(0.1 + 0.9 * table.index_bytes / whole)


def test_disks_without_room_are_refused():
    with pytest.raises(ValueError, match=r"Disk.reads.*0"):
        Disk(num_bytes=1, reads=0)


def test_a_table_in_a_file_takes_the_memory_of_its_cache(tmp_path):
    def planned(storage):
        ebc = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name="t", num_embeddings=1_000_000, embedding_dim=64, feature_names=["f"], storage=storage
                )
            ],
            device="meta",
        )
        (table,) = tables_of_model(ebc)
        topology = Topology(world_size=2, compute_device="cpu", ddr_cap=60 << 20)
        return table.in_memory, topology, table

    share, topology, table = planned(FileRows(path=tmp_path, cache_rows=100_000))
    assert share == pytest.approx(0.1)
    plan_tables([table], topology, batch_size=64)
    share, topology, table = planned(None)
    assert share == 1.0
    with pytest.raises(ValueError, match="memory"):
        plan_tables([table], topology, batch_size=64)
    assert slot_bytes(0) <= _CACHE_ROW_OVERHEAD
