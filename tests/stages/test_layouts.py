import pytest
import torch

import meshrec
from meshrec.models.dlrm import DLRM
from meshrec.planner import Link
from meshrec.stages.choosing import UnitCost
from meshrec.stages.layouts import layouts, simulate
from meshrec.stages.programs import names_of, stages_at_cuts
from meshrec.stages.tracing import trace

BATCH = 32


def model(width):
    table = meshrec.EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=1 << 40, feature_names=["f"])
    ebc = meshrec.EmbeddingBagCollection([table], device="meta")
    return DLRM(ebc, 4, [16, 8], [width, width, width, 1])


def compared(width, bandwidth, world_size=4):
    lengths = torch.full((BATCH,), 2)
    sparse = meshrec.KeyedJaggedTensor.from_lengths_sync(["f"], torch.arange(2 * BATCH) << 30, lengths)
    dlrm = model(width)
    link = Link(latency=1e-6, all_to_all=bandwidth, reduce_scatter=bandwidth, all_reduce=bandwidth)
    found = layouts(dlrm, torch.randn(BATCH, 4), sparse, world_size=world_size, link=link)
    assert dlrm.sparse_arch.embedding_bag_collection.embedding_bags["t"].weight.is_meta
    return found


def test_many_parameters_over_a_slow_link_want_stages():
    found = compared(512, 1e6)
    assert "stages" in found[0].name
    assert [layout.seconds for layout in found] == sorted(layout.seconds for layout in found)
    names = [layout.name for layout in found]
    assert any(name.startswith("2 stages x 2 copies, ") for name in names)
    assert any(name.startswith("4 stages, ") for name in names)
    # Copies send every parameter twice over, less a rank's share: 1.5 times here.
    num_bytes = sum(p.nbytes for name, p in model(512).named_parameters() if "embedding" not in name)
    copies = next(layout for layout in found if "DDP" in layout.name)
    assert copies.exchange == pytest.approx(1e-6 + 1.5 * num_bytes / 1e6, rel=1e-6)
    assert all(layout.seconds >= layout.compute > 0 for layout in found)
    assert copies.seconds < copies.compute + copies.exchange  # the first bucket leaves before the end
    for layout in found:
        num_cuts = next((n - 1 for n in (2, 4) if layout.name.startswith(f"{n} stages")), 0)
        assert len(layout.cuts) in (0, num_cuts)  # names cannot tell every cut of branches
        assert (layout.split_size is not None) == (num_cuts > 0)


def test_cuts_have_names_where_names_tell_them():
    chain = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
    traced = trace(chain)
    for stage_of in ([0, 0, 1, 1], [0, 1, 1, 2]):
        names = names_of(traced, stage_of)
        assert len(names) == max(stage_of)
        assert stages_at_cuts(traced, names) == stage_of


def test_the_way_through_the_schedule():
    stages = [UnitCost(1.0, 2.0)] * 2
    assert simulate(stages, [0.0], 0.0, num_splits=4) == pytest.approx(15.0)  # 2 * 3 and 3 more splits
    assert simulate(stages, [0.5], 0.25, num_splits=1) == pytest.approx(7.5)
    # The second split's gradients leave at 7.75, after forward and backward of the first one.
    assert simulate(stages, [0.5], 0.25, num_splits=2) == pytest.approx(10.5)


def test_a_fast_link_costs_its_latency():
    for layout in compared(8, 1e18, world_size=2):
        assert 1e-6 <= layout.exchange < 5e-6


def test_a_batch_smaller_than_the_ranks_is_refused():
    with pytest.raises(ValueError, match=r"32 samples.*64 ranks"):
        compared(8, 1e9, world_size=64)
