import pytest

from meshrec.data import DenseColumn, IdColumn, Schema


def test_features_follow_the_id_columns():
    ids = [IdColumn(name="a", num_embeddings=5, average_length=2.0, sequence=True, table="t")]
    (feature,) = Schema(label="y", ids=ids, dense=[DenseColumn(name="x")]).described()
    assert (feature.name, feature.num_embeddings, feature.average_length) == ("a", 5, 2.0)
    assert (feature.sequence, feature.table) == (True, "t")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_embeddings": 0}, r"'a': num_embeddings must lie in \[1, 2\*\*32\], got 0"),
        ({"num_embeddings": 5, "missing": 5}, r"'a': missing must lie in \[0, 5\), got 5"),
        ({"num_embeddings": 1, "missing": 0, "hashed": True}, "1 row cannot hold hashed ids"),
    ],
)
def test_wrong_id_columns(options, message):
    with pytest.raises(ValueError, match=message):
        IdColumn(name="a", **options)


def test_columns_are_named_once():
    with pytest.raises(ValueError, match=r"columns given twice: \['y'\]"):
        Schema(label="y", ids=[IdColumn(name="y", num_embeddings=2)])
    with pytest.raises(ValueError, match=r"needs id columns.* ids: \[\]"):
        Schema(label="y", ids=[])
