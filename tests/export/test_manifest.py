import hashlib
import json
from math import prod

import pytest

from meshrec.durable import write_digests
from meshrec.export import PackageError, Predictor, compile_anew
from meshrec.export.manifest import layout_of, read_manifest, verify_package
from tests.export.conftest import NUM_ROWS, torchs_own_warnings
from tests.export.test_package import copied, replace


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    replace(path, data)


def files_of(folder):
    return sorted(path.name for path in folder.iterdir())


def test_every_file_of_a_package_is_verified(small_package, tmp_path):
    assert "digests.txt" in files_of(small_package)
    folder = copied(small_package, tmp_path)
    verify_package(folder, read_manifest(folder))
    assert layout_of(read_manifest(folder)) == (folder / "layout.txt").read_text()
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        flip(path, len(content) // 2)
        with pytest.raises(PackageError, match=rf"{path.name}.*(Copy the package again|Export a model)"):
            Predictor(folder)
        replace(path, content)
    verify_package(folder, read_manifest(folder))


@pytest.mark.parametrize("name", ["weights.bin", "program.pt2", "exported.pt2", "layout.txt"])
def test_packages_without_digests_are_verified_by_their_manifest(package, tmp_path, name):
    folder = copied(package, tmp_path)
    (folder / "digests.txt").unlink()
    assert Predictor(folder).version == Predictor(package).version
    flip(folder / name, 100)
    with pytest.raises(PackageError, match=f"{name}.*SHA-256"):
        Predictor(folder)


def test_nothing_is_used_before_it_is_verified(package, tmp_path, monkeypatch):
    folder = copied(package, tmp_path)
    flip(folder / "program.pt2", 1000)
    monkeypatch.setattr(
        "meshrec.export.predictor.Weights", lambda *_, **__: pytest.fail("weights are mapped")
    )
    with pytest.raises(PackageError, match=r"program.pt2"):
        Predictor(folder)
    with pytest.raises(PackageError, match=r"program.pt2"):
        compile_anew(folder, tmp_path / "anew")
    assert not (tmp_path / "anew").exists()


def test_a_caller_who_trusts_the_disk_reads_no_checksums(uncompiled, tmp_path):
    folder = copied(uncompiled, tmp_path)
    flip(folder / "weights.bin", 100)
    with torchs_own_warnings():
        Predictor(folder, verify=False)


def test_a_manifest_that_differs_from_the_layout_is_told(uncompiled, tmp_path):
    folder = copied(uncompiled, tmp_path)
    (folder / "digests.txt").unlink()
    manifest = json.loads((folder / "manifest.json").read_text())
    replace(
        folder / "manifest.json", json.dumps({**manifest, "features": ["a", "b", "c"], "rows": {}}).encode()
    )
    with pytest.raises(PackageError, match=r"layout.txt"):
        Predictor(folder)


def reverse_features(manifest):
    manifest["features"].reverse()


def flatten(manifest):
    manifest["weights"][0]["shape"] = [prod(manifest["weights"][0]["shape"])]


def exchange_names(manifest):
    first, second, *_ = (each for each in manifest["weights"] if each["shape"] == [NUM_ROWS, 8])
    first["name"], second["name"] = second["name"], first["name"]


def raise_rows(manifest):
    manifest["rows"] = {feature: 10 * rows for feature, rows in manifest["rows"].items()}


@pytest.mark.parametrize("change", [reverse_features, flatten, exchange_names, raise_rows])
def test_a_manifest_with_right_digests_that_is_not_the_programs_is_told(uncompiled, tmp_path, change):
    folder = copied(uncompiled, tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    replace(folder / "layout.txt", layout_of(manifest).encode())
    manifest["sha256"]["layout.txt"] = hashlib.sha256((folder / "layout.txt").read_bytes()).hexdigest()
    replace(folder / "manifest.json", json.dumps(manifest).encode())
    (folder / "digests.txt").unlink()
    write_digests(folder)
    with pytest.raises(PackageError, match=r"manifest.json.*exported.pt2"):
        Predictor(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_dense": "4"}, "number of dense columns is '4'"),
        ({"shared": ["nobody"]}, "a shared feature is 'nobody'"),
        ({"outputs": "x"}, "kind of outputs is 'x'"),
        ({"compiled": 1}, "must be true or false"),
        ({"rows": {"f0": -1}}, "rows of 'f0' is -1"),
        ({"about": []}, "says about its run"),
        ({"more": 1}, "has the unknown"),
        ({"torch": "2\nisa x"}, "line break"),
    ],
)
def test_a_manifest_that_cannot_be_true_is_refused(uncompiled, tmp_path, change, words):
    folder = copied(uncompiled, tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    replace(folder / "manifest.json", json.dumps({**manifest, **change}).encode())
    for verify in (True, False):
        with pytest.raises(PackageError, match=f"manifest.json.*{words}"):
            Predictor(folder, verify=verify)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "manifest.json", "a\0b", ""])
def test_a_list_of_files_stays_in_its_folder(uncompiled, tmp_path, name):
    folder = copied(uncompiled, tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"][name] = "0" * 64
    replace(folder / "manifest.json", json.dumps(manifest).encode())
    with pytest.raises(PackageError, match="folder"):
        read_manifest(folder)


def test_weights_that_overlap_are_refused(uncompiled, tmp_path):
    folder = copied(uncompiled, tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["weights"][1]["offset"] = 0
    replace(folder / "manifest.json", json.dumps(manifest).encode())
    with pytest.raises(PackageError, match="0"):
        read_manifest(folder)
