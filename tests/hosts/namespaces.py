"""The marks of tests that need hosts."""

import os
import random
import time
from pathlib import Path

import pytest

from tests.hosts.linux_hosts import Host, hosts, send, why_not

__all__ = [
    "ROOT",
    "SEED",
    "STEPS_A_LIFE",
    "Host",
    "hosts",
    "kills",
    "makes_hosts",
    "needs_hosts",
    "num_kills",
    "send",
    "until",
]
ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("MESHREC_SEED", "0"))
"""Seed of the steps at which hosts are killed, and of the choice of hosts."""
makes_hosts = pytest.mark.skipif("MESHREC_HOSTS" not in os.environ, reason="`make hosts` runs it")
"""The heavy tests: some minutes each."""
needs_hosts = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
STEPS_A_LIFE = 60
"""Steps between the steps near which hosts are killed."""


def num_kills(most):
    """The number of hosts that a test kills: MESHREC_HOSTS, at most ``most``."""
    return min(most, int(os.environ.get("MESHREC_HOSTS", "0")))


def kills(number):
    """The steps near which a run is killed, drawn with SEED, each with the number of one of two hosts."""
    rng = random.Random(SEED)
    return [(STEPS_A_LIFE * kill + rng.randrange(5, 50), rng.randrange(2)) for kill in range(number)]


def until(condition, seconds=120.0, what=""):
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.05)
