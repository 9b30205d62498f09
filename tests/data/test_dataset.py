import pytest

from meshrec import PoolingType
from meshrec.data import Feature, embedding_bag_configs


def test_tables_of_features():
    movie, history, user = embedding = [
        Feature(name="movie", num_embeddings=9),
        Feature(name="history", num_embeddings=9, sequence=True, table="movie"),
        Feature(name="user", num_embeddings=5),
    ]
    shared, own = embedding_bag_configs(embedding, 4)
    assert (shared.name, shared.feature_names, shared.pooling) == (
        "movie",
        [movie.name, history.name],
        PoolingType.MEAN,
    )
    assert (own.name, own.num_embeddings, own.embedding_dim, own.pooling) == ("user", 5, 4, PoolingType.SUM)
    assert user.table is None


def test_features_of_one_table_have_one_size():
    features = [
        Feature(name="a", num_embeddings=2, table="t"),
        Feature(name="b", num_embeddings=3, table="t"),
    ]
    with pytest.raises(ValueError, match=r"'t'.*\['a', 'b'\].*\[2, 3\]"):
        embedding_bag_configs(features, 4)
