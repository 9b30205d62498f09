import logging

import numpy as np
import pytest

from meshrec.data.faults import DataError, Faults, did_you_mean, nearest, needs


def test_raising_names_the_first_row():
    kept = np.array([True, False, True, True])
    with pytest.raises(
        DataError,
        match=r"row 12.*2 rows.*4.*on_error",
    ):
        Faults("raise").check(kept, np.array([True, False, False, False]), "f: row {row} is bad", 10)


def test_skipping_counts_and_warns_once(caplog):
    faults, kept = Faults("skip"), np.array([True, False, True])
    with caplog.at_level(logging.WARNING):
        faults.check(kept, np.array([False, False, True]), "row {row}")
        faults.check(np.array([True, False, True]), np.array([False, False, True]), "row {row}")
    assert kept.tolist() == [False, False, True]
    assert dict(faults.skipped) == {"row 0 (1 row of 3)": 1}
    assert [record.message for record in caplog.records] == ["skipped 1 row: row 0 (1 row of 3)"]


def test_missing_packages_name_the_extra():
    with pytest.raises(ModuleNotFoundError, match=r"no_such_package.*\[data\]"):
        needs("no_such_package.part", "data")
    with pytest.raises(ValueError, match=r"on_error.*'raise'.*'skip'.*'warn'"):
        Faults("warn")


def test_a_package_that_warns_as_it_is_imported_is_not_heard(tmp_path, monkeypatch):
    lines = [f"warnings.warn('old', {kind})" for kind in ("DeprecationWarning", "FutureWarning")]
    lines.append("warnings.warn('pkg_resources is deprecated as an API.')")
    (tmp_path / "warns_of_itself.py").write_text("\n".join(["import warnings", *lines]))
    monkeypatch.syspath_prepend(tmp_path)
    assert needs("warns_of_itself", "train").__name__ == "warns_of_itself"


def test_a_fault_of_every_row_does_not_advise_to_skip_them_all():
    with pytest.raises(DataError, match="Every row") as caught:
        Faults("raise").check(np.ones(3, np.bool_), np.zeros(3, np.bool_), "f: row {row} is bad")
    assert "skip" not in str(caught.value)


def test_names_may_hold_braces():
    with pytest.raises(DataError, match=r"a\{b\}\.csv, column 'x\{0\}': row 3 "):
        Faults("raise").check(
            np.ones(4, bool), [True] * 3 + [False], "a{b}.csv, column 'x{0}': row {row} is bad"
        )


def test_the_nearest_name():
    names = ["train", "tune", "Evaluate"]
    assert nearest("trian", names) == "train"
    assert nearest("evaluat", names) == "Evaluate"
    assert nearest("xyz", names) is None
    assert did_you_mean("tun", names) == " Did you mean tune?"
    assert did_you_mean("xyz", names) == ""
