"""The order in which rows go."""

import pytest
import torch

from meshrec.tables.hashed.eviction import order_of_rows

LEAST, MOST = -(2**63), 2**63 - 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("low", "high"), [(7, 8), (-3, 4), (-(2**31), 2**31 - 1), (LEAST, MOST)])
@pytest.mark.parametrize("spread", [1, 2**40, 2**53])
def test_rows_are_in_the_order_of_score_and_key(dtype, low, high, spread):
    """Keys that are close to each other have the same highest bits."""
    generator = torch.Generator().manual_seed(0)
    info = torch.iinfo(dtype)
    low, high = max(low, info.min), min(high, info.max)
    keys = (torch.randperm(1000, generator=generator) - 500) * spread
    keys = torch.cat([keys, torch.tensor([LEAST, MOST])])
    scores = torch.randint(low, high, (len(keys),), generator=generator, dtype=dtype)
    found = order_of_rows(scores, keys).tolist()
    pairs = list(zip(scores.tolist(), keys.tolist(), strict=True))
    assert found == sorted(range(len(pairs)), key=pairs.__getitem__)
    assert order_of_rows(scores[:0], keys[:0]).tolist() == []
