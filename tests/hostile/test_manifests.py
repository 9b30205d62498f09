"""Manifests with a right checksum and wrong content: verify and load refuse them, and no weight changes."""

import json
import random
import zlib

import pytest
import torch

from meshrec.checkpoint import CheckpointError, load, read_manifest, save, verify_data
from meshrec.checkpoint.manifest import MANIFEST
from tests.hostile.damage import Tally, crafted, number
from tests.hostile.two_ranks import load_each, save_sharded

SIZE = (6, 4)


def fresh():
    model = torch.nn.Sequential(torch.nn.Linear(*SIZE), torch.nn.Linear(*SIZE[::-1]))
    return {"model": model, "numbers": [torch.zeros(5), {"n": torch.zeros(3, dtype=torch.int64)}]}


def tensors_of(state):
    named = {name: tensor.clone() for name, tensor in state["model"].state_dict().items()}
    return {**named, "0": state["numbers"][0].clone(), "1": state["numbers"][1]["n"].clone()}


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in other)


class Target:
    """A sound checkpoint whose manifest is replaced, and what is in it."""

    def __init__(self, folder):
        torch.manual_seed(0)
        state = fresh()
        state["numbers"] = [torch.rand(5), {"n": torch.arange(3)}]
        save(folder, state)
        self.folder, self.saved = folder, tensors_of(state)
        self.said = json.loads((folder / MANIFEST).read_bytes().split(b"\n")[0])

    def seal(self, said):
        body = json.dumps(said).encode()
        content = body + f'\n{{"crc32": {zlib.crc32(body)}}}\n'.encode()
        (self.folder / MANIFEST).write_bytes(content)

    def check_refused(self, *, sees_data):
        """``sees_data``: the change is one of a checksum, which only the data can tell: see `load`."""
        with pytest.raises(CheckpointError):
            verify_data(self.folder, read_manifest(self.folder))
        state = fresh()
        before = tensors_of(state)
        with pytest.raises(CheckpointError):
            load(self.folder, state)
        assert sees_data or equal(tensors_of(state), before)


@pytest.fixture
def target(tmp_path):
    return Target(tmp_path)


def only_checksums(said, changed):
    """Whether nothing but checksums of blocks differs, in a form that could be right."""
    try:
        others = json.loads(json.dumps(changed))
        for name, record in others["tensors"].items():
            for piece, sound in zip(record[3], said["tensors"][name][3], strict=True):
                piece[5] = sound[5]
        return others == said
    except (TypeError, KeyError, IndexError, ValueError, AttributeError):
        return False


def test_crafted_files_and_tensors_are_refused(target):
    tally, draw = Tally("crafted manifests"), random.Random(11)
    while tally.tried < number(40):
        part = draw.choice(["files", "tensors", "tensors", "tensors"])
        what, changed = crafted(target.said[part], draw)
        if json.dumps(changed, sort_keys=True) == json.dumps(target.said[part], sort_keys=True):
            continue  # the change was none
        said = {**target.said, part: changed}
        target.seal(said)
        sees_data = only_checksums(target.said, said)
        tally.attempt(
            f"{part}: {what}", lambda sees_data=sees_data: target.check_refused(sees_data=sees_data)
        )
    tally.finish()


def test_crafted_values_do_not_change_weights_silently(target):
    """A plain value may be another, as nothing else says it: then every tensor is right all the same."""

    def plain_tensors_are_right(target, numbers):
        """Where the lists and dicts around them are still there."""
        try:
            found = [numbers[0], numbers[1]["n"]]
        except (TypeError, KeyError, IndexError):
            return True
        return all(
            not isinstance(tensor, torch.Tensor) or torch.equal(tensor, target.saved[name])
            for name, tensor in zip("01", found, strict=True)
        )

    tally, draw = Tally("crafted values of manifests"), random.Random(12)

    def check():
        state = fresh()
        before = tensors_of(state)
        try:
            verify_data(target.folder, read_manifest(target.folder))
            load(target.folder, state)
        except CheckpointError:
            assert equal(tensors_of(state), before)
        except ValueError as error:
            # A sound checkpoint, of another state than this one.
            assert "the entry" in str(error) or "checkpoint" in str(error)  # noqa: PT017
            assert equal(tensors_of(state), before)
        else:
            model = {name: tensor.clone() for name, tensor in state["model"].state_dict().items()}
            assert all(torch.equal(tensor, target.saved[name]) for name, tensor in model.items())
            assert plain_tensors_are_right(target, state["numbers"])

    for _ in range(number(40)):
        part = draw.choice(["step", "world_size", "values", "values", "plans", "version", "format"])
        what, changed = crafted(target.said[part], draw) if part != "step" else ("strange", [])
        target.seal({**target.said, part: changed})
        tally.attempt(f"{part}: {what}", check)
    tally.finish()


def test_crafted_manifests_are_told_alike_on_both_ranks(ranks, tmp_path):
    tally, draw = Tally("crafted manifests on two ranks"), random.Random(14)
    ranks(2).run(save_sharded, tmp_path)
    said = json.loads((tmp_path / MANIFEST).read_bytes().split(b"\n")[0])
    attacks, contents = [], []
    for _ in range(number(30)):
        part = draw.choice(["files", "tensors", "tensors", "values"])
        what, changed = crafted(said[part], draw)
        body = json.dumps({**said, part: changed}).encode()
        attacks.append(f"{part}: {what}")
        contents.append(body + f'\n{{"crc32": {zlib.crc32(body)}}}\n'.encode())

    def check(one, other):
        assert one == other
        assert one is None or one[0] in ("CheckpointError", "DamagedCheckpointError", "ValueError")

    for at in range(0, len(contents), 50):  # few at once: ranks that load for minutes count as lost
        part = slice(at, at + 50)
        for what, *told in zip(
            attacks[part], *ranks(2).run(load_each, tmp_path, contents[part]), strict=True
        ):
            tally.attempt(what, lambda told=told: check(*told))
    tally.finish()
