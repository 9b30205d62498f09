"""Every stopped, killed or cut-off rank ends the run, and is named.

Here one of our launcher's ranks is killed; ``tests/cli/test_train.py`` stops another.
``MESHREC_HOSTILE=1000`` draws 20 such faults, and prints how long each took; ``MESHREC_SEED`` draws others.
"""

import os
import socket
import sys

import pytest

from tests.hostile.damage import Tally
from tests.hostile.faulty_ranks import (
    RANK_TIMEOUT,
    Fault,
    Outcome,
    can_cut,
    cut,
    draw,
    run,
    run_by_hand,
)

NUMBER = max(1, int(os.environ.get("MESHREC_HOSTILE") or 0) * 20 // 1000)
SEED = int(os.environ.get("MESHREC_SEED", "0"))
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def failure(fault: Fault, outcome: Outcome) -> str | None:
    """What is wrong with how a run ended; None if it held."""
    signs = {"stopped": "stopped answering", "killed": "was killed by signal 9 (SIGKILL)"}
    if outcome.code != 1:
        return f"exit code {outcome.code}: {outcome.told}"
    if f"rank {fault.rank} {signs[fault.kind]}" not in outcome.told:
        return f"not named: {outcome.told}"
    return "a traceback" if "Traceback" in outcome.told else None


@pytest.mark.parametrize("number", range(NUMBER))
def test_lost_ranks_are_named(tmp_path, capsys, number):
    fault, tally = list(draw(NUMBER, SEED))[number], Tally("lost ranks")
    outcome = run(fault, tmp_path)
    tally.tried += 1
    if (wrong := failure(fault, outcome)) is not None:
        tally.failures.append(f"{fault}: {wrong}")
    if "MESHREC_HOSTILE" in os.environ:
        with capsys.disabled():
            print(f"\n{fault}: {outcome.seconds:.1f} s with --rank-timeout {RANK_TIMEOUT}")
    tally.finish()


# Where a cable can be cut, rank 0 names rank 1 below.
@pytest.mark.parametrize("stopped", [0] if can_cut() and "MESHREC_HOSTILE" not in os.environ else [0, 1])
def test_a_stopped_rank_is_named_without_a_launcher(tmp_path, stopped):
    """Rank 0 hosts the store by which the others find out who answers: it is named when it is stopped."""
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        port = each.getsockname()[1]
    outcome = run_by_hand(tmp_path, stopped, port=port)
    assert outcome.code == 1, outcome.told
    assert f"no answer from rank {stopped}" in outcome.told


@pytest.mark.skipif(not can_cut(), reason="this user may not make networks of his own")
def test_machines_that_are_cut_off_from_each_other_name_each_other(tmp_path):
    apart = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29511"}
    # Processes of one host would read each other's memory.
    outcome = cut("two_machines", tmp_path, MASTER_ADDR="10.9.0.1", MESHREC_HOST_LINK="0", **apart)
    assert outcome.code == 0, outcome.told
    for rank in range(2):
        assert (tmp_path / f"code{rank}").read_text() == "1\n"
        told = (tmp_path / "mine" / f"error_rank{rank}.txt").read_text()
        assert f"no answer from rank {1 - rank}" in told


@pytest.mark.skipif(not can_cut(), reason="this user may not make networks of his own")
def test_a_machine_without_loopback_ends_the_run(tmp_path):
    outcome = cut("no_loopback", tmp_path, "--nproc", 2, MESHREC_HOST_LINK="0")
    assert outcome.code == 1, outcome.told
    assert (
        "CollectiveError" in outcome.told or "Timed out" in outcome.told or "did not answer" in outcome.told
    )
