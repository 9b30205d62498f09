import os
import resource
import signal

import pytest
import torch

from meshrec.checkpoint import (
    CheckpointError,
    DamagedCheckpointError,
    async_save,
    load,
    read_manifest,
    save,
    saving,
    snapshot,
)
from meshrec.comms.mesh import default_env
from meshrec.testing import RankError


def loaded(folder):
    state = {"a": None}
    load(folder, state)
    return state["a"]


def test_a_checkpoint_is_replaced_in_one_moment(tmp_path, monkeypatch):
    save(tmp_path, {"a": torch.ones(3)}, step=1)

    def full(*_, token):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_durably", full)
        with pytest.raises(CheckpointError, match="OSError"):
            save(tmp_path, {"a": torch.zeros(3)}, step=2)
    assert loaded(tmp_path).tolist() == [1, 1, 1]
    assert len(list(tmp_path.iterdir())) == 2
    save(tmp_path, {"a": torch.zeros(3)}, step=3)
    assert loaded(tmp_path).tolist() == [0, 0, 0]
    assert read_manifest(tmp_path).step == 3
    assert len(list(tmp_path.iterdir())) == 2


def disk_full_on_one_rank(folder):
    state = {"a": torch.ones(100_000), "b": torch.ones(100_000)}
    save(folder / "good", state)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if default_env().world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        for background in (False, True):
            with pytest.raises(CheckpointError, match=r"OSError.*\[Errno 27\].*rank 1"):
                async_save(folder / "x", state).wait() if background else save(folder / "x", state)
            assert default_env().world.rank or not (folder / "x").exists()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    load(folder / "good", state)
    save(folder / "x", state)
    return [path.name.split("-")[0] for path in sorted((folder / "x").iterdir())]


def test_a_full_disk_leaves_the_run_alive_and_nothing_behind(ranks, tmp_path):
    assert ranks(2).run(disk_full_on_one_rank, tmp_path)[0] == ["data", "data", "manifest.json"]


def in_the_background(folder):
    state = {"a": torch.ones(200_000), "b": torch.ones(100_000)}
    done = []
    pending = async_save(folder, state, step=4, after=lambda: done.append(True))
    state["a"].zero_()
    assert pending.wait() == folder
    assert pending.wait() == folder
    assert not pending.is_writing
    load(folder, state)
    return bool(state["a"].eq(1).all()), done, sorted(path.suffix for path in folder.iterdir())


def test_a_save_in_the_background_is_of_the_moment_it_began(ranks, tmp_path):
    first, second = ranks(2).run(in_the_background, tmp_path)
    assert first == (True, [True], [".json", ".safetensors", ".safetensors"])
    assert second[:2] == (True, [])


def a_writer_is_killed(folder):
    state = {"a": torch.ones(3_000_000), "b": torch.ones(3_000_000)}
    is_killed = default_env().world.rank == 1
    with pytest.MonkeyPatch.context() as patch:
        if is_killed:  # not before the signal comes does it end
            patch.setattr(snapshot, "write_data_file", lambda *_: signal.pause())
        pending = async_save(folder, state)
    if is_killed:
        os.kill(pending._job.writer.snapshot._pid, signal.SIGKILL)
    pending.wait()


def test_a_killed_writer_is_an_error_on_all_ranks(ranks, tmp_path):
    with pytest.raises(RankError, match="rank 1") as failure:
        ranks(2).run(a_writer_is_killed, tmp_path / "x")
    assert "rank 0:" in str(failure.value)
    assert not (tmp_path / "x").exists()


def given_up(folder):
    pending = async_save(folder, {"a": torch.ones(1000)})
    pending.kill()
    assert not pending.is_writing


def test_giving_up(tmp_path):
    given_up(tmp_path / "x")


def damaged_for_one(folder):
    """The file of rank 1's part is damaged; rank 0 does not read it."""
    from torch.distributed.tensor import DTensor, Shard

    mesh = default_env().mesh
    rows = torch.full((4, 2), float(default_env().world.rank))
    table = torch.nn.ParameterDict({"t": DTensor.from_local(rows, mesh, [Shard(0)])})
    save(folder, {"a": table})
    manifest = read_manifest(folder)
    piece = max(manifest.tensors["a.t"].pieces)
    path = folder / manifest.files[piece.file].name
    if default_env().world.rank == 0:
        with open(path, "r+b") as file:
            file.seek(piece.start)
            file.write(b"\1")
    torch.distributed.barrier()
    load(folder, {"a": table})


def test_damage_is_an_error_on_all_ranks(ranks, tmp_path):
    with pytest.raises(RankError, match=r"DamagedCheckpointError.*'a.t'") as failure:
        ranks(2).run(damaged_for_one, tmp_path)
    assert "rank 0:" in str(failure.value)


def test_what_was_never_finished(tmp_path):
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json"):
        load(tmp_path, {})
