"""Damaged and crafted deltas: none is put in place, each has its reason, and mending lets a model go on."""

import hashlib
import json
import os
import random

import pytest
import torch

from meshrec.checkpoint.delta import write_tensors
from meshrec.checkpoint.delta_files import read_record
from meshrec.durable import sealed, unsealed
from meshrec.modules.served_table import INDEX
from meshrec.ops import keyed
from meshrec.ops.index import mix
from meshrec.ops.initial_rows import uniform_rows
from meshrec.ops.keyed import KeyIndex, UniformInit, pack_buckets
from meshrec.ops.tbe import LookupOptions, Lookups
from meshrec.serve.fresh import Deltas, apply_deltas
from tests.hostile.damage import Tally, crafted, harm, number

NUM_ROWS, DIM = 40, 4
# A hashed table: the package has the even ones of these IDs, and deltas bring some and take others away.
ITEMS = [-(1 << 63), -5, -1, 0, 3, 4, 8, 1 << 40, (1 << 63) - 1]
FORMULA = {"seed": 7, "max_rows": 20, "dim": DIM, "first_seed": 3, "low": -1.0, "high": 1.0}
CHANGED = {1: ([-5, 0], [3, -1]), 2: ([-1, 3], [0]), 3: ([-(1 << 63), 8], [-5, -1, 1 << 40])}
"""By delta: the IDs that get rows, and those that are evicted."""


def first_rows(ids):
    """What IDs read that have no row."""
    return uniform_rows(ids, seed=3, low=-1.0, high=1.0, columns=(0, DIM))


def package_of_items():
    """The tensors of the hashed table."""
    keys = mix(torch.tensor(ITEMS[::2]), FORMULA["seed"]).sort().values
    return {
        "items.weight": torch.ones(len(keys), DIM),
        "items.buckets": pack_buckets(keys),
        "items.added": torch.empty(2, 0, dtype=torch.int64),
        "items.added_rows": torch.empty(0, DIM),
    }


def read_items(weights):
    """What each of ``ITEMS`` reads."""
    found_by = KeyIndex(*(weights[f"items.{part}"] for part in INDEX), 7, UniformInit(3, -1.0, 1.0))
    ids = torch.tensor(ITEMS)
    lookups = Lookups(ids, torch.arange(len(ids) + 1), None, None, 1, [0], [0], [0], False, [DIM])
    options = LookupOptions(len(ids), torch.float32, True, torch.empty(0, dtype=torch.uint8))
    return keyed.forward([0], {0: found_by}, [weights["items.weight"]], lookups, options)


def publish(folder, at, draw):
    """Write delta ``at`` as training does; give the weights that it changes."""
    ids = torch.tensor(sorted(draw.sample(range(NUM_ROWS), 5)))
    rows, bias = torch.full((5, DIM), at / 10), torch.full((1,), at / 10)
    items, gone = (torch.tensor(sorted(each)) for each in CHANGED[at])
    hashed = {"items.weight.ids": items, "items.weight.gone": gone}
    hashed["items.weight.rows"] = torch.full((len(items), DIM), at / 10)
    tensors = {"rows": {"table.ids": ids, "table.rows": rows, **hashed}, "dense": {"bias": bias}}
    digests = {}
    for kind, named in tensors.items():
        path = folder / f"{at:08d}.{kind}.safetensors"
        write_tensors(path, named)
        digests[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    said = {
        "format": 3,
        "number": at,
        "run": "r",
        "since": 10 * (at - 1),
        "step": 10 * at,
        "rows": {"table": 5, "items.weight": len(items)},
        "gone": {"items.weight": len(gone)},
        "sha256": digests,
        "previous": read_record(folder, at - 1).digest if at > 1 else "",
        "tracked": ["items.weight", "table"],
        "whole": ["bias"],
        "event_time": 1_700_000_000_000_000,
    }
    (folder / f"{at:08d}.json").write_bytes(sealed(said))
    return ids


class Follower:
    """A model that follows three deltas, and what it must hold after each."""

    def __init__(self, folder):
        draw = random.Random(1)
        self.folder = folder
        begin = {"table": torch.zeros(NUM_ROWS, DIM), "bias": torch.zeros(1)}
        self.expected = [{**begin, "items": read_items(package_of_items())}]
        for at in (1, 2, 3):
            ids = publish(folder, at, draw)
            after = {name: weight.clone() for name, weight in self.expected[-1].items()}
            after["table"][ids], after["bias"][:] = at / 10, at / 10
            for at_item, item in enumerate(ITEMS):
                if item in CHANGED[at][0]:
                    after["items"][at_item] = at / 10
                elif item in CHANGED[at][1]:
                    after["items"][at_item] = first_rows(torch.tensor([item]))[0]
            self.expected.append(after)

    def begin(self):
        fixed = {name: self.expected[0][name].clone() for name in ("table", "bias")}
        self.weights = {**fixed, **package_of_items()}
        about = {"run": "r", "step": 0}
        return Deltas(self.folder, about, self.weights, hashed={"items.weight": FORMULA})

    def holds(self, at):
        found = {**self.weights, "items": read_items(self.weights)}
        return all(torch.equal(found[name], w) for name, w in self.expected[at].items())


def check(follower, mend, *, sealed_anew=False):
    """``sealed_anew``: a record may be accepted whose step or run is another; its weights are right, too."""
    deltas = follower.begin()
    apply_deltas(deltas)
    reached = deltas.freshness.delta or 0
    assert follower.holds(reached)
    assert reached == 3 or deltas.freshness.reason or is_unpublished(follower.folder, reached + 1)
    mend()
    if sealed_anew:
        deltas = follower.begin()  # the delta after a record that was accepted follows on the one before
    apply_deltas(deltas)
    assert deltas.freshness.delta == 3
    assert deltas.freshness.reason == ""
    assert follower.holds(3)


def is_unpublished(folder, at):
    """The records are written last: without them, nothing was published from there on."""
    return not any(os.path.lexists(folder / f"{each:08d}.json") for each in range(at, 4))


@pytest.fixture
def follower(tmp_path):
    return Follower(tmp_path)


def test_damaged_files_of_deltas(follower):
    tally, draw = Tally("damaged deltas"), random.Random(7)
    files = sorted(follower.folder.iterdir())
    for _ in range(number(60)):
        path = draw.choice(files)
        what, mend = harm(path, draw)
        tally.attempt(what, lambda mend=mend: check(follower, mend))
        mend()
    tally.finish()


def test_crafted_records_of_deltas(follower):
    """With a right checksum, and wrong content."""
    tally, draw = Tally("crafted deltas"), random.Random(8)
    for _ in range(number(60)):
        path = follower.folder / f"{draw.choice([1, 2, 3]):08d}.json"
        content = path.read_bytes()
        what, said = crafted(unsealed(content, "it", required=True), draw)
        path.write_bytes(sealed(said) if isinstance(said, dict) else json.dumps(said).encode())
        tally.attempt(
            f"{path.name}: {what}",
            lambda path=path, content=content: check(
                follower, lambda: path.write_bytes(content), sealed_anew=True
            ),
        )
        path.write_bytes(content)
    tally.finish()


def test_crafted_tensors_of_deltas(follower):
    """With right digests in a sealed record, and other tensors than the record says."""
    tally = Tally("crafted tensors of deltas")
    good = torch.tensor([1, 2]), torch.ones(2, DIM)
    bias = torch.ones(1)
    attacks = {
        "ids fall": ({"ids": good[0].flip(0), "rows": good[1]}, {"bias": bias}),
        "an id twice": ({"ids": torch.tensor([1, 1]), "rows": good[1]}, {"bias": bias}),
        "an id below 0": ({"ids": torch.tensor([-1, 2]), "rows": good[1]}, {"bias": bias}),
        "an id outside": ({"ids": torch.tensor([1, NUM_ROWS]), "rows": good[1]}, {"bias": bias}),
        "ids of int32": ({"ids": good[0].int(), "rows": good[1]}, {"bias": bias}),
        "too few rows": ({"ids": good[0], "rows": good[1][:1]}, {"bias": bias}),
        "flat rows": ({"ids": good[0], "rows": good[1].flatten()}, {"bias": bias}),
        "wide rows": ({"ids": good[0], "rows": torch.ones(2, DIM + 1)}, {"bias": bias}),
        "double rows": ({"ids": good[0], "rows": good[1].double()}, {"bias": bias}),
        "no ids": ({"rows": good[1]}, {"bias": bias}),
        "a third tensor": ({"ids": good[0], "rows": good[1], "more": bias}, {"bias": bias}),
        "no bias": ({"ids": good[0], "rows": good[1]}, {}),
        "a wide bias": ({"ids": good[0], "rows": good[1]}, {"bias": torch.ones(2)}),
        "another weight": ({"ids": good[0], "rows": good[1]}, {"bias": bias, "other": bias}),
    }
    items = {
        "items.weight.ids": torch.tensor([-3, 5]),
        "items.weight.rows": torch.ones(2, DIM),
        "items.weight.gone": torch.tensor([-1, 0]),
    }
    for what, changed in {
        "items fall": {"ids": torch.tensor([5, -3])},
        "evicted ids fall": {"gone": torch.tensor([0, -1])},
        "an item has a row and is evicted": {"gone": torch.tensor([-3, 0])},
        "more evicted ids than are said": {"gone": torch.tensor([-1, 0, 1])},
        "evicted ids of int32": {"gone": torch.tensor([-1, 0]).int()},
        "wide rows of items": {"rows": torch.ones(2, DIM + 1)},
        "double rows of items": {"rows": torch.ones(2, DIM).double()},
    }.items():
        named = {f"../items.weight.{part}": tensor for part, tensor in changed.items()}
        attacks[what] = ({"ids": good[0], "rows": good[1], **named}, {"bias": bias})
    folder = follower.folder
    counts = {"table": 2, "items.weight": 2}
    files = {path: path.read_bytes() for path in folder.iterdir()}
    record = unsealed(files[folder / "00000003.json"], "it", required=True)

    def mend():
        for path, content in files.items():
            path.write_bytes(content)

    def refused():
        deltas = follower.begin()
        apply_deltas(deltas)
        assert deltas.freshness.delta == 2
        assert deltas.freshness.reason
        assert follower.holds(2)

    for what, (rows, dense) in attacks.items():
        digests = {}
        named = {f"table.{part}".removeprefix("table.../"): tensor for part, tensor in rows.items()}
        named = {**items, **named}
        for kind, tensors in (("rows", named), ("dense", dense)):
            path = folder / f"00000003.{kind}.safetensors"
            write_tensors(path, tensors)
            digests[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        (folder / "00000003.json").write_bytes(
            sealed(
                {
                    **record,
                    "rows": counts,
                    "gone": {"items.weight": 2},
                    "sha256": digests,
                    "whole": sorted(dense),
                }
            )
        )
        tally.attempt(what, refused)
        mend()
        tally.attempt(f"{what}, mended", lambda: check(follower, mend))
    tally.finish()
