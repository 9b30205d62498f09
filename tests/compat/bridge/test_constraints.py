from dataclasses import fields

import pytest
from torch import nn

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig
from meshrec.compat.bridge import planner
from meshrec.compat.bridge.constraints import ParameterConstraints
from meshrec.compat.bridge.plans import BoundsCheckMode
from meshrec.compat.bridge.sharders import EmbeddingBagCollectionSharder
from meshrec.planner import types

# What each field is changed to, and what that does: "another plan", or the error's words.
CHANGES = {
    "sharding_types": (["column_wise"], "another plan"),
    "compute_kernels": (["dense"], "another plan"),
    "min_partition": (8, "another plan"),
    "pooling_factors": ([30.0], "another plan"),
    "num_poolings": ([4.0], "another plan"),
    "batch_sizes": ([640], "another plan"),
    "is_weighted": (True, "table 'a': its constraints say is_weighted, but its collection is not"),
    "cache_params": (object(), "no constraint cache_params: tables are not cached"),
    "enforce_hbm": (True, "no constraint enforce_hbm"),
    "stochastic_rounding": (False, "always rounded stochastically"),
    "bounds_check_mode": (
        1,
        "no constraint bounds_check_mode: .* bounds_check=BoundsCheckMode. Leave bounds_check_mode out",
    ),
    "feature_names": (["x"], r"name the features \['x'\], its config \['f'\]"),
    "output_dtype": ("FP16", "output_dtype FP16: a sharded collection gives fp32"),
    "device_group": ("cpu", "device_group is 'cpu', but the topology is for cuda"),
    "key_value_params": (object(), "no constraint key_value_params: tables are in memory"),
    "use_virtual_table": (True, "use_virtual_table"),
}


def planned(**given):
    config = EmbeddingBagConfig(name="a", num_embeddings=100_000, embedding_dim=64, feature_names=["f"])
    model = nn.ModuleDict({"ebc": EmbeddingBagCollection([config], device="meta")})
    found = planner.EmbeddingShardingPlanner(
        topology=planner.Topology(4, "cuda"),
        timeout_seconds=2,
        constraints={"a": ParameterConstraints(**given)},
    ).plan(model, [EmbeddingBagCollectionSharder()])
    return found.plan["ebc"]["a"], found.planned.seconds


def test_the_list_has_every_field():
    assert list(CHANGES) == [field.name for field in fields(ParameterConstraints)]


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_is_followed_or_refused(field):
    value, effect = CHANGES[field]
    beside = {"sharding_types": ["column_wise"]} if field == "min_partition" else {}
    if effect == "another plan":
        assert planned(**beside, **{field: value}) != planned(**beside)
    else:
        with pytest.raises(ValueError, match=effect):
            planned(**{field: value})


def test_what_asks_for_nothing_else_is_taken():
    same = {"stochastic_rounding": True, "output_dtype": "FP32", "device_group": "cuda"}
    assert planned(**same, feature_names=["f"]) == planned()


def test_kernels():
    assert planned(compute_kernels=["dense"], sharding_types=["row_wise"])[0].compute_kernel == "dense"
    both = planned(compute_kernels=["dense", "fused"], sharding_types=["table_wise"])[0]
    assert (both.sharding_type, both.compute_kernel) == ("table_wise", "fused")
    assert planned(compute_kernels=["fused"])[0].sharding_type != "data_parallel"
    with pytest.raises(ValueError, match=r"\['dense', 'fused', 'quant'\].*\['fused_uvm'\]"):
        ParameterConstraints(compute_kernels=["fused_uvm"])
    with pytest.raises(ValueError, match="'a'"):
        planned(compute_kernels=["fused"], sharding_types=["data_parallel"])


def test_they_are_values():
    assert ParameterConstraints(["row_wise"], min_partition=8) == ParameterConstraints(["row_wise"], None, 8)
    assert len({ParameterConstraints(), ParameterConstraints(), ParameterConstraints(["row_wise"])}) == 2
    with pytest.raises(ValueError, match="'b'"):
        make_for("b")


def make_for(name):
    config = EmbeddingBagConfig(name="a", num_embeddings=10, embedding_dim=64, feature_names=["f"])
    constraints = {name: types.ParameterConstraints()}
    planner.EmbeddingShardingPlanner(topology=planner.Topology(2, "cpu"), constraints=constraints).plan(
        EmbeddingBagCollection([config], device="meta"), [EmbeddingBagCollectionSharder()]
    )


def test_fatal_bounds_checks_are_what_collections_do():
    constraints = ParameterConstraints(bounds_check_mode=BoundsCheckMode.FATAL)
    assert constraints.to_core("a", device="cpu", features=["f"], is_weighted=False)
    with pytest.raises(ValueError, match="bounds_check_mode"):
        ParameterConstraints(bounds_check_mode=BoundsCheckMode.WARNING)
