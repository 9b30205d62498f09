import pytest

from meshrec.optim.table_names import by_full_name, full_names

TABLES = {"user": ["ids", "country"], "item": ["ids"], "": ["root"]}


def test_only_names_of_several_modules_get_their_path():
    assert full_names(TABLES) == {
        ("user", "ids"): "user.ids",
        ("user", "country"): "country",
        ("item", "ids"): "item.ids",
        ("", "root"): "root",
    }


def test_options_take_bare_and_full_names():
    options = {"user.ids": 1, "user.country": 2, "root": 3}
    assert by_full_name(options, TABLES, "options name") == {"user.ids": 1, "country": 2, "root": 3}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"ids": 1}, r"'ids'.*\['user.ids', 'item.ids'\]"),
        ({"idz": 1}, "'idz'"),
        ({"country": 1, "user.country": 2}, "twice"),
    ],
)
def test_names_of_no_table_of_several_and_one_given_twice_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        by_full_name(options, TABLES, "options name")
