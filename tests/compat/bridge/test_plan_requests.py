import dataclasses

import pytest

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig
from meshrec.compat.bridge import planner
from meshrec.compat.bridge.constraints import ParameterConstraints
from meshrec.compat.bridge.plan_requests import (
    DefaultPlannerExecutor,
    DefaultPlannerProvider,
    DefaultPlanReporter,
    PlannerConfig,
    PlannerProvider,
    PlannerSessionContext,
    PlannerVariant,
    ProductionPlannerOrchestrator,
    ShardingPlannerAPI,
    ShardingPlanRequest,
    StorageReservationPolicy,
)
from meshrec.compat.bridge.sharders import EmbeddingBagCollectionSharder


def make_model():
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=64, embedding_dim=64, feature_names=[name])
        for name in ("a", "b")
    ]
    return EmbeddingBagCollection(tables, device="meta")


def make_request(**changes):
    return ShardingPlanRequest(
        **{
            "model": make_model(),
            "sharders": [EmbeddingBagCollectionSharder()],
            "world_size": 2,
            "local_world_size": 2,
            "batch_size": 128,
            "ddr_gb": 1.0,
            "compute_device": "cpu",
            "planner_config": PlannerConfig(timeout_seconds=2),
            **changes,
        }
    )


def plan_of(request, **options):
    context = PlannerSessionContext(request=request, results={})
    orchestrator = ProductionPlannerOrchestrator(DefaultPlannerExecutor(), "H100", **options)
    results = orchestrator.plan(request, context)
    assert results == context.results
    return results["H100"], context


def test_a_request_is_planned_as_by_the_planner():
    request = make_request(constraints={"a": ParameterConstraints(sharding_types=["row_wise"])})
    result, context = plan_of(request)
    expected = planner.EmbeddingShardingPlanner(
        topology=planner.Topology(2, "cpu", ddr_cap=1 << 30),
        batch_size=128,
        storage_reservation=planner.HeuristicalStorageReservation(0.15),
        constraints=request.constraints,
        timeout_seconds=2,
    ).plan(make_model(), request.sharders)
    assert result.success
    assert result.planner_failure_reason is None
    assert result.sharding_plan.plan[""]["a"].sharding_type == "row_wise"
    assert str(result.sharding_plan) == str(expected)
    assert result.critical_path_ms == expected.planned.seconds * 1e3
    assert result.estimated_max_ddr_bytes >= 64 * 64 * 4
    assert result.estimated_max_hbm_bytes == 0
    assert 1 <= result.perf_imbalance_ratio <= 2
    assert result.max_rank_perf >= result.mean_rank_perf > 0
    assert (result.request_id, result.request_hash) == (request.request_id, request.request_hash)
    topology = context.topology_cache["H100", 2, 2]
    assert (topology.ddr_cap, context.storage_reservations_used["H100"].percentage) == (1 << 30, 0.15)


def test_a_function_may_make_the_model():
    assert plan_of(make_request(model=make_model))[0].success


def test_without_a_plan_the_result_has_the_reason(caplog):
    result, _ = plan_of(make_request(ddr_gb=1e-5))
    assert not result.success
    assert result.sharding_plan is None
    assert "missing" in result.planner_failure_reason
    assert result.planner_failure_reason in caplog.text


def test_other_errors_are_raised():
    with pytest.raises(TypeError, match="made by the test"):
        plan_of(make_request(model=lambda: (_ for _ in ()).throw(TypeError("made by the test"))))
    request = make_request()
    with pytest.raises(ValueError, match=request.request_id):
        ProductionPlannerOrchestrator(DefaultPlannerExecutor(), "H100").plan(
            make_request(), PlannerSessionContext(request=request, results={})
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"proposer_type": "greedy"}, "proposer_type.*'greedy'"),
        ({"partitioner_type": "greedy_perf"}, "partitioner_type.*'greedy_perf'"),
        ({"planner_variant": PlannerVariant.MANIFOLD}, "planner_variant.*MANIFOLD"),
        ({"storage_reservation_policy": StorageReservationPolicy.SKU_AWARE}, "policy.*SKU_AWARE"),
    ],
)
def test_options_that_the_planner_does_not_have(options, message):
    with pytest.raises(ValueError, match=message):
        PlannerConfig(**options)


def test_reservations():
    provider = DefaultPlannerProvider()
    for config, expected, dense_bytes in [
        (PlannerConfig(dense_tensor_estimate=7), 0.15, 7),
        (PlannerConfig(storage_reservation_percentage=0.0), 0.0, 0),
        (
            PlannerConfig(
                storage_reservation_policy=StorageReservationPolicy.FIXED_PERCENTAGE,
                storage_reservation_percentage=0.3,
            ),
            0.3,
            0,
        ),
    ]:
        found = provider.build_storage_reservation("H100", make_request(planner_config=config))
        assert (found.percentage, found.dense_bytes) == (expected, dense_bytes)
    own = planner.FixedPercentageStorageReservation(0.5)
    assert provider.build_storage_reservation("H100", make_request(storage_reservation=own)) is own


def test_the_hash_tells_what_is_planned():
    request = make_request()
    assert dataclasses.replace(request, request_id="other").request_hash == request.request_hash
    assert dataclasses.replace(request, batch_size=64).request_hash != request.request_hash
    constraints = [(name, ParameterConstraints(sharding_types=["row_wise"])) for name in "ab"]
    hashes = {
        dataclasses.replace(request, constraints=dict(items)).request_hash
        for items in (constraints, constraints[::-1])
    }
    assert len(hashes) == 1
    assert request.request_hash not in hashes


def test_subclasses_name_machines_and_groups_get_one_plan():
    groups = []

    class Provider(DefaultPlannerProvider):
        def build_planner(self, sku, **parts):
            built = super().build_planner(sku, **parts)
            built.collective_plan = lambda *args: groups.append(args[2]) or built.plan(*args[:2])
            return built

    class Group:
        def rank(self):
            return 1

    class Machines(ShardingPlannerAPI):
        def _targets(self, request):
            return ["A", "B", "A"]

    assert isinstance(Provider(), PlannerProvider)
    request, group = make_request(), Group()
    context = PlannerSessionContext(request=request, results={})
    results = Machines(DefaultPlannerExecutor(Provider()), broadcast_pg=group).plan(request, context)
    assert list(results) == ["A", "B"]
    assert groups == [group, group]
    assert not results["A"].is_planning_rank


def test_sinks_of_a_reporter_are_not_called_and_a_warning_says_so(caplog):
    class Reporter(DefaultPlanReporter):
        def build_stats(self, ctx, sku):
            return [object()]

    plan_of(make_request(), reporter=Reporter())
    assert "Reporter" in caplog.text
