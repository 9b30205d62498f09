from meshrec.compat.bridge import columns


def test_one_name_for_each_column():
    assert len(columns.DEFAULT_COLUMN_NAMES) == len(set(columns.DEFAULT_COLUMN_NAMES)) == 1 + 13 + 26
    assert columns.DEFAULT_CAT_NAMES[-1] == "cat_25"
