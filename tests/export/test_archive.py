import importlib
import pickle
import shutil
import zipfile

import pytest
import torch

from meshrec.export import PackageError, Predictor, archive
from meshrec.export.archive import load_exported
from tests.export.conftest import torchs_own_warnings


def test_packages_need_no_pickle(uncompiled, small_package, requests, monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("a pickle is loaded")

    load_exported(uncompiled / "exported.pt2")  # imports what torch needs for it, which asks for Unpickler
    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    with torchs_own_warnings():
        for folder in (uncompiled, small_package):
            Predictor(folder)(*requests(3))


def test_torch_still_has_the_modules_that_servers_import_before_they_fork():
    for name in archive._READERS:
        importlib.import_module(name)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("exported/data/sample_inputs/model.pt", b"x"),
        ("exported/data/constants/custom_obj_0", b"x"),
        ("exported/data/weights/other_config.json", b'{"config": {"w": {"use_pickle": true}}}'),
    ],
)
def test_an_archive_with_pickles_is_refused(uncompiled, tmp_path, name, data):
    path = tmp_path / "exported.pt2"
    shutil.copyfile(uncompiled / "exported.pt2", path)
    with torchs_own_warnings(), zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, data)
    with pytest.raises(PackageError, match="pickles"):
        load_exported(path)
