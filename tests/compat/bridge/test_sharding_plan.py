import pytest
import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig
from meshrec.compat.bridge import sharding_plan as sp
from meshrec.optim import apply_optimizer_in_backward


@pytest.fixture
def ebc():
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=8, embedding_dim=4, feature_names=[name])
        for name in ("a", "b")
    ]
    return EmbeddingBagCollection(tables, device="meta")


def plan(ebc, a, b=None, **given):
    sizes = {"local_size": 2, "world_size": 4, "device_type": "cpu", **given}
    return sp.construct_module_sharding_plan(ebc, {"a": a, "b": b or sp.data_parallel()}, **sizes)


def shards(placed):
    found = placed.sharding_spec.shards
    return [(*s.shard_offsets, *s.shard_sizes, s.placement.rank()) for s in found]


@pytest.mark.parametrize(
    ("generator", "expected"),
    [
        (sp.table_wise(rank=3), [(0, 0, 8, 4, 3)]),
        (sp.row_wise(), [(0, 0, 2, 4, 0), (2, 0, 2, 4, 1), (4, 0, 2, 4, 2), (6, 0, 2, 4, 3)]),
        (sp.column_wise(ranks=[2, 0]), [(0, 0, 8, 2, 2), (0, 2, 8, 2, 0)]),
        (sp.column_wise(size_per_rank=[1, 0, 3]), [(0, 0, 8, 1, 0), (0, 1, 8, 3, 2)]),
        (sp.table_row_wise(host_index=1), [(0, 0, 4, 4, 2), (4, 0, 4, 4, 3)]),
        (
            sp.grid_shard(host_indexes=[0, 1]),
            [(0, 0, 4, 2, 0), (4, 0, 4, 2, 1), (0, 2, 4, 2, 2), (4, 2, 4, 2, 3)],
        ),
    ],
)
def test_rectangles(ebc, generator, expected):
    assert shards(plan(ebc, generator)["a"]) == expected


def test_kernels(ebc):
    apply_optimizer_in_backward(torch.optim.SGD, [ebc.embedding_bags["a"].weight], {"lr": 0.1})
    found = plan(ebc, sp.table_wise(rank=0), sp.table_wise(rank=0))
    assert [found[name].compute_kernel for name in "ab"] == ["fused", "dense"]
    assert plan(ebc, sp.table_wise(0, compute_kernel="dense"))["a"].compute_kernel == "dense"


def test_one_generator_for_all(ebc):
    assert list(sp.apply_to_all(ebc, sp.row_wise())) == ["a", "b"]
    assert next(iter(sp.get_module_to_default_sharders())) is EmbeddingBagCollection


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda ebc: plan(ebc, sp.row_wise(sizes_placement=([8], "cpu"))), "row_wise"),
        (lambda ebc: plan(ebc, sp.column_wise()), "column_wise.*size_per_rank"),
        (lambda ebc: plan(ebc, sp.column_wise(size_per_rank=[1, 2])), "makes 3.*4"),
        (lambda ebc: plan(ebc, sp.table_wise(0, device="mtia")), "device"),
        (lambda ebc: plan(ebc, sp.table_wise(0, compute_kernel="sparse")), "'sparse'"),
        (lambda ebc: plan(ebc, sp.table_wise(rank=4)), "rank 4.*4 ranks"),
        (
            lambda ebc: sp.construct_module_sharding_plan(ebc, {"a": sp.row_wise()}, None, 1, 1, "cpu"),
            r"\['a', 'b'\].*\['a'\]",
        ),
    ],
)
def test_wrong_plans(ebc, make, message):
    with pytest.raises(ValueError, match=message):
        make(ebc)
