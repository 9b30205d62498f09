import pytest
import torch

from meshrec.models import ItemFrequency


def test_it_finds_the_share_of_frequent_and_of_rare_items():
    torch.manual_seed(0)
    share = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01])
    frequency = ItemFrequency(6)
    for _ in range(400):
        frequency(torch.multinomial(share, 50, replacement=True))
    frequency.eval()
    found = frequency(torch.arange(6)).exp()
    assert torch.allclose(found[:5], share, rtol=0.25)
    assert found[5] == pytest.approx(1 / (400 * 50 + 1))  # never seen


def test_it_follows_data_that_changes():
    torch.manual_seed(0)
    frequency = ItemFrequency(2, rate=0.05)
    for share in ([0.9, 0.1], [0.1, 0.9]):
        for _ in range(300):
            frequency(torch.multinomial(torch.tensor(share), 20, replacement=True))
    assert torch.allclose(frequency(torch.arange(2)).exp(), torch.tensor([0.1, 0.9]), rtol=0.3)


def test_evaluation_counts_nothing_and_the_state_goes_on():
    first = ItemFrequency(3)
    first(torch.tensor([0, 0, 1]))
    first.eval()
    before = first(torch.arange(3))
    assert torch.equal(first(torch.arange(3)), before)
    second = ItemFrequency(3)
    second.load_state_dict(first.state_dict())
    first.train()
    assert torch.equal(first(torch.tensor([2, 0])), second(torch.tensor([2, 0])))
    assert first(torch.tensor([], dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize(("items", "rate"), [(0, 0.1), (3, 0.0), (3, 1.5)])
def test_it_needs_an_item_and_a_rate(items, rate):
    with pytest.raises(ValueError, match=f"{items}.*{rate}"):
        ItemFrequency(items, rate=rate)
