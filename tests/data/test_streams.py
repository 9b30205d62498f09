"""Types of the columns in streams, from which packages read requests."""

import json

import pyarrow as pa
import pytest

from meshrec.data.features import Features, Key, Label
from meshrec.data.messages import MessageDecoder
from meshrec.data.raw_values import RawValues, table_of
from meshrec.data.streams import ColumnTypes

FEATURES = Features(labels=(Label(column="y"),), features=(Key(name="id", max_rows=10),))
LARGE = 2**60 + 1


def keys(types, value):
    """Return the keys of a request with a value."""
    raw = RawValues(FEATURES, types)
    return raw.encode(table_of({"id": [value]}, raw)).values["id"].tolist()


@pytest.mark.parametrize(
    ("value", "nothing"), [("text", None), (LARGE, None), (["text"], []), ([LARGE], [None])]
)
def test_a_column_without_values_before_a_restart_gets_the_type_of_later_values(value, nothing):
    decoder = MessageDecoder(FEATURES)

    def types_after(ids, earlier=None):
        types = ColumnTypes(FEATURES.columns())
        if earlier is not None:
            types.add(earlier)
        (decoded,) = decoder.decode([json.dumps({"y": 1, "id": id_}).encode() for id_ in ids])
        assert decoded.problems == {}
        types.add(decoded.table.schema, decoder.untyped(decoded.table))
        return types.schema

    empty = types_after([None, nothing])
    assert pa.types.is_null(empty.field("id").type)
    assert types_after([nothing], empty) == empty
    types = types_after([nothing, value], empty)
    values = pa.array(value if isinstance(value, list) else [value])
    assert keys(types, value) == FEATURES.ids[0].rows_of(values).tolist()
    assert types_after([nothing], types) == types


@pytest.mark.parametrize("kind", [pa.float64(), pa.list_(pa.float64())])
def test_large_ids_in_requests_are_exact_although_records_have_floats(kind):
    types = ColumnTypes(FEATURES.columns())
    is_list = pa.types.is_list(kind)
    for id_type in (pa.list_(pa.int64()) if is_list else pa.int64(), kind):
        types.add(pa.schema([("y", pa.int64()), ("id", id_type)]))
    assert types.schema.field("id").type == kind
    for value in (LARGE, 3.0, None):
        expected = FEATURES.ids[0].rows_of(pa.array([value]).cast(pa.int64()))
        assert keys(types.schema, [value] if is_list else value) == expected.tolist()
