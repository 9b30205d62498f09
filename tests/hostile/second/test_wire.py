"""Requests drawn from HTTP's grammar, in conversations, beside good requests: second program."""

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from meshrec.export import Predictor
from tests.hostile.damage import NUMBER, Tally
from tests.hostile.second.programs import Steady, serving
from tests.hostile.second.test_joints import package
from tests.hostile.second.wire import answers, check, conversation, talk
from tests.serve.conftest import samples, scores_of

SEED = int(os.environ.get("MESHREC_SEED", "0")) + 3200
GIVEN = samples(3, 5)
AT_ONCE = 6
MOST_GROWTH = 64 << 20
"""Bytes by which the memory of the server may grow over 9,000 requests."""


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wire")
    clicks = package(folder / "clicks", 1)
    expected = scores_of(Predictor(clicks), GIVEN)
    limits = ("--header-seconds", 3, "--body-seconds", 3, "--idle-seconds", 3)
    with serving(folder, f"clicks={clicks}", *limits) as program:
        yield program, Steady(program, json.dumps(GIVEN).encode(), [expected])


def test_answers_are_read_strictly():
    sound = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n{}"
    assert [each.status for each in answers(sound + sound)] == [400, 400]
    for bad in (sound[:-1], sound + b"x", sound.replace(b"HTTP/1.1", b"HTTP/1.0"), b"\r\n" + sound):
        with pytest.raises(AssertionError):
            answers(bad)


def test_conversations(target):
    program, steady = target
    body = json.dumps(GIVEN).encode()
    tally, sent, memory = Tally("second program: requests"), 0, None

    def attack(number):
        draw = random.Random(f"{SEED} {number}")
        requests = conversation(body, draw)
        what = f"conversation {number}: {', '.join(each.name for each in requests)}"

        def hold():
            got, is_seen = talk(program.port, requests, draw)
            check(requests, got, steady.is_right, is_seen=is_seen)

        return what, hold, len(requests)

    def run(attacks):
        for what, hold, size in attacks:
            tally.attempt(what, hold)
            tally.tried += size - 1  # what is counted is requests

    wanted, number = 10 * NUMBER or 150, 0
    with steady, ThreadPoolExecutor(AT_ONCE) as pool:
        while sent < wanted:
            attacks = [attack(number + at) for at in range(10 * AT_ONCE)]
            number, sent = number + len(attacks), sent + sum(each[2] for each in attacks)
            list(pool.map(run, [attacks[at::AT_ONCE] for at in range(AT_ONCE)]))
            tally.attempt(f"ready after {number}", lambda: _assert(program.is_ready(), "health"))
            for seen in steady.take():
                is_held = seen.status == 200 and steady.is_right(seen.body)
                tally.attempt("good request", lambda is_held=is_held, seen=seen: _assert(is_held, seen))
            if memory is None and sent > 1000:
                memory = program.memory()
    if memory is not None:
        growth = program.memory() - memory
        print(f"\nmemory: {memory >> 20} MiB after 1,000 requests, {growth >> 20} MiB more after {sent}")
        tally.attempt(f"memory grew by {growth}", lambda: _assert(growth < MOST_GROWTH, growth))
    tally.finish()


def _assert(holds, what):
    assert holds, what
