import torch

from meshrec.train import Placement, join
from meshrec.train.building import build


def test_first_weights_are_the_same_sharded_or_not(small):
    recipe = small()
    dataset = recipe.data.load()
    sharded = build(recipe, dataset, join("cpu"))
    plain = build(small(placement=Placement(sharded=False)), dataset, join("cpu"))
    assert plain.plan is None
    assert sharded.plan is not None
    expected = plain.model.state_dict()
    for name, value in sharded.model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert set(sharded.tables.params) == set(plain.tables.params)
    assert set(sharded.dense.params) == set(plain.dense.params)
