from dataclasses import dataclass

import pytest

from meshrec.compat.bridge.adapted import Adapted


@dataclass(frozen=True, kw_only=True)
class Size:
    rows: int
    columns: int = 1

    @classmethod
    def square(cls, rows):
        return cls(rows=rows, columns=rows)


def positional(num_rows, num_columns=2):
    """In the other library's way."""
    return Size(rows=num_rows, columns=num_columns)


Other = Adapted(Size, positional)


def test_it_constructs_in_the_other_way():
    assert Other(3) == Size(rows=3, columns=2)
    assert Other(num_rows=3, num_columns=4) == Size(rows=3, columns=4)
    assert Other.square(2) == Size(rows=2, columns=2)


def test_it_is_the_class_to_isinstance():
    assert isinstance(Other(1), Other)
    assert isinstance(Size(rows=1), Other)
    assert not isinstance(3, Other)
    assert issubclass(Size, Other)


def test_it_can_be_inherited_from():
    class Larger(Other):
        pass

    assert Larger.__mro__[1] is Size
    assert isinstance(Larger(rows=1), Other)


def test_it_serves_in_annotations():
    assert str(Other | None) == str(Size | None)
    assert str(None | Other) == str(None | Size)
    assert repr(Other) == repr(Size)
    assert Other.__name__ == "Size"
    assert Other.__doc__ == "In the other library's way."


def test_unknown_attributes():
    with pytest.raises(AttributeError, match="circle"):
        _ = Other.circle
    assert not hasattr(Other, "__fields__")
