from meshrec.train import SyntheticClicks


def test_options_reach_the_data():
    data = SyntheticClicks(num_samples=50, num_validation=100, num_features=2, num_embeddings=7, num_dense=1)
    dataset = data.load()
    assert (dataset.train.num_samples, dataset.validation.num_samples, dataset.num_dense) == (50, 100, 1)
    assert [feature.num_embeddings for feature in dataset.features] == [7, 7]
