"""Hashed tables in files train, are saved, moved and resumed as hashed tables in memory are: to the bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, FileRows, Hashed
from tests.tables.cached.file_tables import HASHED, check_drawn_programs, same, tables_of, whole

alone, batches, train = HASHED.alone, HASHED.batches, HASHED.train
DRAWS = int(os.environ.get("MESHREC_DRAWS", "4"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_drawn_programs_give_the_bits_of_memory(ranks, tmp_path, world_size):
    check_drawn_programs(ranks(world_size), "hashed", tmp_path, DRAWS // 2)


def test_ids_that_nobody_trains_leave_no_rows(tmp_path):
    model = alone(tmp_path)
    train(model, range(3))
    before = whole(model)
    written = [table.store.file.table.counts.num_written for table in tables_of(model)]
    with torch.no_grad():
        for batch in batches(range(20, 24)):
            model(batch)
    assert same(whole(model), before)
    assert [len(table.store.file.table._new_rows.keys) for table in tables_of(model)] == [0, 0, 0]
    assert sum(t.store.file.table.counts.num_written for t in tables_of(model)) - sum(written) < 100


def test_a_snapshot_stays_while_rows_go_and_slots_get_others(tmp_path):
    model = alone(tmp_path, cached=60)
    train(model, range(6))
    before = whole(model)
    table = tables_of(model)[0]
    snapshot = table.snapshot()
    train(model, range(6, 20))
    assert table.report.evicted > 0
    rows = [block.parts["weight"].clone() for block in snapshot.stream()]
    snapshot.close()
    assert torch.equal(torch.cat(rows), before["ebc.embedding_bags.t.weight"])
    assert not list(Path(tmp_path).glob("*/*.log-*"))


def test_an_unsharded_module_is_refused_outside_of_meta(tmp_path):
    with pytest.raises(ValueError, match=r"'t'.*storage=FileRows....*'meta'"):
        EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name="t",
                    embedding_dim=8,
                    feature_names=["f"],
                    keys=Hashed(max_rows=10),
                    storage=FileRows(path=tmp_path, cache_rows=4),
                )
            ]
        )


def test_runs_that_are_killed_end_as_if_they_had_not_been(tmp_path):
    program = Path(__file__).with_name("killed_file_rows.py")
    kills = os.environ.get("MESHREC_KILLS", "2")
    found = subprocess.run(
        [sys.executable, str(program), str(tmp_path), kills, "2", "hashed"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert f"{kills} kills" in found.stdout
