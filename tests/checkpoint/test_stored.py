"""Checkpoints in an object store: here a folder by its address, and S3 where a server for tests is
installed.
"""

import os
import threading
import time

import pytest
import torch

from meshrec.checkpoint import CheckpointError, CheckpointManager, DamagedCheckpointError
from meshrec.checkpoint.manifest import MANIFEST
from meshrec.checkpoint.stored import ObjectStore
from meshrec.train import join


def saved_and_loaded(address, folder):
    """Ranks whose folders are their own save three times, and load."""
    ranks = join("cpu")
    local = folder / f"host{ranks.rank}"
    kept = CheckpointManager(local, keep_last=2, store=ObjectStore(address))
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(0.0)
    for step in (10, 20, 30):
        with torch.no_grad():
            model.weight.add_(1.0)
        kept.save(step, {"model": model})
    other = torch.nn.Linear(3, 2)
    os.environ["LOCAL_RANK"] = "0"
    try:
        found = kept.load_latest({"model": other})
    finally:
        del os.environ["LOCAL_RANK"]
    left = [str(path) for path in local.rglob("*") if path.is_file()]
    return found, other.weight.mean().item(), kept.steps(), left


def test_ranks_without_a_shared_folder(ranks, tmp_path):
    found = ranks(2).run(saved_and_loaded, f"file://{tmp_path}/store", tmp_path)
    assert found == [(30, 3.0, [20, 30], [])] * 2


def alone(tmp_path, keep_last=2):
    store = ObjectStore(f"file://{tmp_path}/store")
    return CheckpointManager(tmp_path / "local", keep_last=keep_last, store=store)


def test_a_checkpoint_without_its_manifest_is_none(tmp_path):
    kept, model = alone(tmp_path), torch.nn.Linear(3, 2)
    assert kept.load_latest({"model": model}) is None
    assert kept.latest() is None
    kept.save(5, {"model": model})
    kept.async_save(6, {"model": model})
    kept.wait()
    (tmp_path / "store" / "step-0000000006" / MANIFEST).unlink()
    assert kept.steps() == [5]
    assert kept.load_latest({"model": model}) == 5
    kept.remove_after(4)
    assert kept.steps() == []


def test_damage_leads_to_the_checkpoint_before(tmp_path):
    kept, model = alone(tmp_path), torch.nn.Linear(3, 2)
    for step in (5, 6):
        kept.save(step, {"model": model})
    damaged = [*(tmp_path / "store" / "step-0000000006").glob("data-*")]
    damaged[0].write_bytes(b"x")
    assert kept.load_latest({"model": model}) == 5
    for each in (tmp_path / "store").glob("*/data-*"):
        each.write_bytes(b"x")
    with pytest.raises(DamagedCheckpointError):
        kept.load_latest({"model": model})


def test_a_store_that_refuses(tmp_path):
    (tmp_path / "store").write_text("a file, where the store would be")
    with pytest.raises(CheckpointError, match="uploading"):
        alone(tmp_path).save(5, {"model": torch.nn.Linear(3, 2)})
    with pytest.raises(OSError, match=r"."):
        ObjectStore(f"file://{tmp_path}/store").check()
    with pytest.raises(ValueError, match="address"):
        ObjectStore("nosuch://bucket")


def test_s3(tmp_path, monkeypatch):
    pytest.importorskip("flask", reason="no server of S3 for tests is installed")
    server = pytest.importorskip("moto.server", reason="no server of S3 for tests is installed")
    served = server.ThreadedMotoServer(port=0, verbose=False)
    served.start()
    try:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "testing")
        host, port = served.get_host_and_port()
        options = f"?endpoint_override={host}:{port}&scheme=http&region=us-east-1&allow_bucket_creation=true"
        store = ObjectStore(f"s3://bucket/runs{options}").under("mine")
        store.check()
        kept, model = CheckpointManager(tmp_path, keep_last=1, store=store), torch.nn.Linear(3, 2)
        for step in (5, 6):
            kept.save(step, {"model": model})
        assert kept.steps() == [6]
        assert kept.load_latest({"model": torch.nn.Linear(3, 2)}) == 6
        assert all(name.startswith("step-0000000006/") for name in store.names())
    finally:
        served.stop()


def saved_while_training(address, folder):
    """Ranks whose folders are their own go on while their uploads wait for each other."""
    ranks = join("cpu")
    kept = CheckpointManager(folder / f"host{ranks.rank}", store=ObjectStore(address))
    torch.manual_seed(0)  # rank 0 saves the replicated weights
    model = torch.nn.Linear(3, 2)
    before = model.weight.detach().clone()
    uploads, put = threading.Event(), ObjectStore.put

    def late_put(store, local, name):
        assert uploads.wait(60)
        put(store, local, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ObjectStore, "put", late_put)
        pending = kept.async_save(7, {"model": model})
        with torch.no_grad():
            model.weight.add_(1.0)
        was_writing, complete = pending.is_writing, kept.steps()
        uploads.set()
        kept.wait()
    os.environ["LOCAL_RANK"] = "0"
    try:
        found = kept.load_latest({"model": model})
    finally:
        del os.environ["LOCAL_RANK"]
    left = [str(path) for path in (folder / f"host{ranks.rank}").iterdir()]
    return was_writing, complete, found, torch.equal(model.weight, before), left


def test_training_goes_on_during_an_upload(ranks, tmp_path):
    found = ranks(2).run(saved_while_training, f"file://{tmp_path}/store", tmp_path)
    assert found == [(True, [], 7, True, [])] * 2
    names = [path.name.partition("-")[0] for path in (tmp_path / "store").glob("step-0000000007/*")]
    assert sorted(names) == ["data", "data", MANIFEST]


def failing_upload(address, folder):
    ranks = join("cpu")
    kept = CheckpointManager(folder / f"host{ranks.rank}", store=ObjectStore(address))
    state = {"model": torch.nn.Linear(3, 2), "own": {"rank": 1.0}}
    kept.save(1, state)
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 0:
            patch.setattr(ObjectStore, "put", lambda *_: 1 / 0)
        kept.async_save(2, state)
        try:
            kept.wait()
        except CheckpointError as error:
            return str(error), kept.steps()
    return None


def test_a_failed_upload_is_raised_on_every_rank(ranks, tmp_path):
    (error, steps), other = ranks(2).run(failing_upload, f"file://{tmp_path}/store", tmp_path)
    assert "uploading" in error
    assert "ZeroDivisionError" in error
    assert steps == [1]
    assert other == (error, steps)


def test_a_file_on_a_disk_is_seen_when_it_is_complete(tmp_path):
    store, pipe = ObjectStore(f"file://{tmp_path}/store"), tmp_path / "pipe"
    os.mkfifo(pipe)
    upload = threading.Thread(target=store.put, args=(pipe, "note.json"))
    upload.start()
    with pipe.open("wb") as source:
        source.write(b"{}")
        source.flush()
        while store.names(partial=True) != ["note.json.part"]:
            time.sleep(0.01)
        assert store.names() == []
    upload.join()
    assert store.names(partial=True) == ["note.json"]
    assert store.read("note.json") == b"{}"


def test_interrupted_uploads_are_removed_with_their_checkpoint(tmp_path):
    kept = alone(tmp_path)
    kept.save(3, {"model": torch.nn.Linear(3, 2)})
    (folder,) = (tmp_path / "store").iterdir()
    part = folder / "data-0123456789abcdef-00001.safetensors.part"
    part.write_bytes(b"cut")
    assert kept.load_latest({"model": torch.nn.Linear(3, 2)}) == 3
    kept.save(4, {"model": torch.nn.Linear(3, 2)})
    kept.save(5, {"model": torch.nn.Linear(3, 2)})
    assert not folder.exists() or list(folder.iterdir()) == []
