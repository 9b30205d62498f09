"""Faults of a server's processes, files, disk and connections: every answer is right or says why it is none.

``MESHREC_HOSTILE=1000`` draws 50 faults, with a table by kind; ``MESHREC_SEED`` draws others.
"""

import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from meshrec.export import Predictor
from tests.hostile.damage import NUMBER, Tally
from tests.hostile.second.faults import (
    FAULTS,
    MAY_BREAK,
    MAY_LOG,
    MAY_REFUSE,
    SMALL_DISK,
    Place,
    can_mount,
    said_of,
    workers,
)
from tests.hostile.second.programs import Steady, serving
from tests.hostile.second.test_joints import package
from tests.serve.conftest import samples, scores_of

SEED = int(os.environ.get("MESHREC_SEED", "0")) + 3300
NUM_FAULTS = max(2, NUMBER * 50 // 1000)
GIVEN = samples(3, 5)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture
def place(tmp_path):
    if not can_mount():
        pytest.skip("this user may not have a disk of his own")
    packages = [package(tmp_path / f"v{seed}", seed) for seed in (1, 2)]
    expected = [scores_of(Predictor(each), GIVEN) for each in packages]
    (tmp_path / "clicks").symlink_to(packages[0])
    disk = tmp_path / "disk"
    disk.mkdir()
    before = ("unshare", "-rm", "sh", "-c", SMALL_DISK, str(disk))
    copies = tmp_path / "copies"
    copies.mkdir()
    with serving(tmp_path, f"clicks={tmp_path / 'clicks'}", "--workers", 2, before=before) as program:
        steady = Steady(program, json.dumps(GIVEN).encode(), expected)
        seen_from_here = Path(f"/proc/{program.process.pid}/root{disk}")
        large = json.dumps(samples(2000, 6)).encode()
        yield Place(program, steady, tmp_path / "clicks", packages, copies, seen_from_here, large)


def check(place, fault, draw):
    """Let it happen, and wait until all is as before. Meanwhile answers are right, or say why not."""
    place.steady.take()
    logged = place.program.log.stat().st_size
    fault(place, draw)
    place.steady.recover()
    place.program.wait_until(lambda: len(workers(place.program)) == 2, "another worker")
    told = place.program.log.read_text(errors="replace")[logged:]
    assert fault in MAY_LOG or "Traceback" not in told, told
    bad = []
    for seen in place.steady.take():
        if seen.status == 200:
            assert place.steady.is_right(seen.body), seen
        elif seen.status == 0:
            assert fault in MAY_BREAK, seen
        else:
            assert seen.status in (503, 504), seen
            assert len(json.loads(seen.body)["error"]) > 10
            bad.append(seen)
    assert fault in MAY_REFUSE or not bad, said_of(bad)


def test_faults_of_servers(place, capsys):
    draw, tally, kinds = (
        random.Random(SEED),
        Tally("second program: faults of servers", seconds=600.0),
        Counter(),
    )
    order = draw.sample(FAULTS, len(FAULTS))
    with place.steady:
        for number in range(NUM_FAULTS):
            fault = order[number] if number < len(order) else draw.choice(FAULTS)
            failed, began = len(tally.failures), time.monotonic()
            tally.attempt(f"{number}: {fault.__name__}", lambda fault=fault: check(place, fault, draw))
            kinds[fault.__name__, len(tally.failures) == failed] += 1
            with capsys.disabled():
                if NUMBER:
                    print(number, fault.__name__, round(time.monotonic() - began, 1), tally.failures[failed:])
            if tally.failures[failed:]:
                place.mend()
            for copy in place.folder.iterdir():
                shutil.rmtree(copy)
    with capsys.disabled():
        if NUMBER:
            for name in sorted({name for name, _ in kinds}):
                print(f"{name:30} held {kinds[name, True]:3} failed {kinds[name, False]:3}")
    tally.finish()
