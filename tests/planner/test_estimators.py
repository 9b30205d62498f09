import math
from dataclasses import replace

import numpy as np
import pytest

from meshrec.comms.wire import FP16, WireFormats
from meshrec.planner.estimators import PHASES, CostModel, Rectangles, UsedCollectives
from meshrec.planner.travel import packed_id_bytes
from meshrec.planner.types import OptimizerKind, Table, Topology
from tests.distributed.test_wire import SCALED

YES, NO = np.array([True]), np.array([False])


def phase(loads_NF, name):
    return loads_NF[0, PHASES.index(name)]


def one_table(**attributes):
    return Table(name="t", num_embeddings=1000, embedding_dim=64, pooling_factors=(10.0,), **attributes)


def rectangle(rows=1000, columns=64, in_node=NO):
    return Rectangles(np.array([0]), np.array([float(rows)]), np.array([float(columns)]), in_node)


def load(model, rows=1000, columns=64, in_node=NO):
    return model.rectangle_loads(rectangle(rows, columns, in_node))


def test_a_whole_table_by_hand(profile):
    topology = Topology(world_size=4, local_world_size=2, hardware=profile)
    loads = load(CostModel([one_table(optimizer=OptimizerKind.SGD)], topology, batch_size=100))
    ids, bags, row = 4 * 100 * 10, 4 * 100, 64 * 4
    # A quarter stays, a quarter goes to the neighbour, half to the other node.
    wire = 0.25 / 1e9 + 0.5 / 2.5e8
    # Rows go to the rank at the receiver's place in the node first: half of them to the neighbour.
    hops = 0.5 / 1e9 + 0.5 / 2.5e8
    assert phase(loads, "ids") == pytest.approx((ids * 4 + bags * 4) * wire + ids * 1e-9)
    assert phase(loads, "lookup") == pytest.approx(ids * (1e-8 + row / 1e10) + bags * row / 2e10)
    passes = bags * row * 2.5 / 2e10  # read and written once; a quarter is copied in place of sent
    assert phase(loads, "output") == phase(loads, "gradient") == pytest.approx(bags * row * hops + passes)
    distinct = 1000 * -np.expm1(-ids / 1000)
    gather = ids * 1e-9 + bags * row / 2e10
    assert phase(loads, "update") == pytest.approx(gather + distinct * (2e-8 + 2 * row / 5e9))
    assert phase(loads, "row_stats") == phase(loads, "replicas") == phase(loads, "data_parallel") == 0


def test_rows_summed_inside_the_node_cross_the_network_once(profile):
    topology = Topology(world_size=4, local_world_size=2, hardware=profile)
    model = CostModel([one_table()], topology, batch_size=100)
    output = 4 * 100 * 64 * 4
    inside = phase(load(model, rows=500, in_node=YES), "output")
    assert inside == pytest.approx(output / 2 / 2e9 + output / 2 * 0.5 / 2.5e8 + output * 2.5 / 2e10)
    assert inside < phase(load(model, rows=500), "output")


def test_loads_are_affine_in_rows_and_columns(profile):
    topology = Topology(world_size=4, local_world_size=2, hardware=profile)
    model = CostModel([one_table()], topology, batch_size=100)
    np.testing.assert_allclose(
        load(model, rows=250) + load(model, rows=750), load(model) + load(model, rows=0)
    )
    parts = load(model, columns=16) + load(model, columns=47)
    np.testing.assert_allclose(parts, load(model, columns=0) + load(model, columns=63))


def test_only_column_parts_exchange_row_statistics(profile):
    topology = Topology(world_size=4, hardware=profile)
    row_wise = CostModel([one_table()], topology, batch_size=100)
    assert phase(load(row_wise), "row_stats") == 0
    assert phase(load(row_wise, columns=32), "row_stats") > 0
    adam = CostModel([one_table(optimizer=OptimizerKind.ADAM)], topology, batch_size=100)
    assert phase(load(adam, columns=32), "row_stats") == 0
    columns = np.array([64, 32])
    assert row_wise.needs_row_stats(np.array([0, 0]), columns).tolist() == [False, True]
    assert not adam.needs_row_stats(np.array([0, 0]), columns).any()


def test_kernels_that_keep_what_they_sorted_pass_over_gradients_again(profile):
    model = CostModel([one_table()], Topology(world_size=4, hardware=profile), batch_size=100)
    keeping = replace(profile, sorts_once=True, statistics_seconds=1e-5)
    kept = CostModel([one_table()], Topology(world_size=4, hardware=keeping), batch_size=100)
    np.testing.assert_array_equal(load(kept), load(model))
    distinct = 1000 * -np.expm1(-4 * 100 * 10 / 1000)
    halves = load(kept, columns=32)
    whole = phase(load(kept), "update") - (elements := 4 * 100 * 64 * 4 / 2e10)
    whole -= (row := distinct * 64 * 8 / 5e9)
    assert phase(halves, "update") == pytest.approx(whole + elements + row / 2 + distinct * 1e-9)
    wire = 0.75 / 1e9
    assert phase(halves, "row_stats") == pytest.approx(1e-5 + distinct * 4 * (2 * wire + 8 / 2e10))
    assert phase(halves, "update") < phase(load(model, columns=32), "update")


def test_ids_of_tables_split_by_rows_cost_more(profile):
    machine = replace(profile, split_id_seconds=2e-9)
    model = CostModel([one_table()], Topology(world_size=4, hardware=profile), batch_size=100)
    split = CostModel([one_table()], Topology(world_size=4, hardware=machine), batch_size=100)
    np.testing.assert_array_equal(load(split), load(model))
    more = phase(load(split, rows=250), "ids") - phase(load(model, rows=250), "ids")
    assert more == pytest.approx(1000 * 2e-9)


def test_a_rank_scans_its_batch_whatever_the_plan(profile):
    machine = replace(profile, scan_id_seconds=2e-9, scan_bag_seconds=3e-9)
    model = CostModel([one_table()], Topology(world_size=4, hardware=machine), batch_size=100)
    fixed = dict(zip(PHASES, model.fixed_seconds(UsedCollectives(False, False, True)), strict=True))
    assert fixed["ids"] == pytest.approx(1000 * 2e-9 + 100 * 3e-9 + 2 * 1e-5)
    assert fixed["output"] == fixed["gradient"] == 1e-5  # nothing travels, but it is waited for


def test_one_rank_sends_nothing(profile):
    model = CostModel([one_table()], Topology(world_size=1, hardware=profile), batch_size=100)
    assert phase(load(model), "ids") == pytest.approx(1000 * 1e-9)  # what is left is to pass over it
    assert phase(load(model), "output") == pytest.approx(100 * 64 * 4 * 4 / 2e10)
    # The two kernels, and the routing.
    assert model.fixed_seconds(UsedCollectives(True, True, True)).sum() == pytest.approx(3e-5)


def test_one_table_of_two_billion_rows_makes_all_ids_wide(profile):
    topology = Topology(world_size=2, hardware=profile)
    narrow, both = (
        load(
            CostModel(
                [one_table(), Table(name="u", num_embeddings=rows, embedding_dim=4)], topology, batch_size=8
            )
        )
        for rows in (2**31 - 1, 2**31)
    )
    assert phase(both, "ids") - phase(narrow, "ids") == pytest.approx(2 * 80 * 4 * 0.5 / 1e9)


def test_data_parallel_sends_whichever_gradient_is_smaller(profile):
    topology = Topology(world_size=4, local_world_size=4, hardware=profile)
    table = Table(name="t", num_embeddings=100, embedding_dim=64)
    small = CostModel([table], topology, batch_size=100).replicated_loads(np.array([0]))
    dense = 2 * 3 / 4 * 100 * 64 * 4 / 4e9
    assert phase(small, "data_parallel") == pytest.approx(dense)
    large = Table(name="t", num_embeddings=10**8, embedding_dim=64)
    loads = CostModel([large], topology, batch_size=100).replicated_loads(np.array([0]))
    sent = 100 * (64 * 4 + 4)  # a gradient row for each bag, and its id; packed once, read from 4 ranks
    assert phase(loads, "data_parallel") == pytest.approx(3 * sent / 2e9 + 2 * 5 * sent / 2e10)


def test_replicas_exchange_gradients_and_shrink_the_group(profile):
    topology = Topology(world_size=4, local_world_size=2, hardware=profile)
    model = CostModel([one_table()], topology, batch_size=100, replicas=2)
    assert model.num_ranks == 2
    assert phase(load(model), "replicas") > 0
    assert phase(load(model), "ids") == pytest.approx((2 * 1000 * 4 + 200 * 4) * 0.5 / 1e9 + 2e-6)
    with pytest.raises(ValueError, match=r"3 replicas.*divide 4"):
        CostModel([one_table()], topology, batch_size=100, replicas=3)


def test_small_replica_groups_on_two_nodes_exchange_between_the_nodes(profile):
    topology = Topology(world_size=16, local_world_size=8, hardware=profile, replicate=(4,))
    model = CostModel([one_table()], topology, batch_size=100, replicas=4)
    # Groups of 4 ranks fit into a node, but the 4 replicas of a shard are on 2 nodes.
    assert phase(load(model), "replicas") == pytest.approx(2 * 3 / 4 * 1000 * 64 * 4 / 1e9)
    fixed = model.fixed_seconds(UsedCollectives(sharded=True, row_stats=False, data_parallel=False))
    assert fixed[PHASES.index("replicas")] == pytest.approx(2 * 2e-5)


def test_half_duplex_adds_what_a_rank_receives(profile):
    slow = replace(profile, full_duplex=False)
    model = CostModel([one_table()], Topology(world_size=2, hardware=slow), batch_size=100)
    mean = np.full(len(PHASES), 3.0)
    shared = dict(zip(PHASES, model.shared_loads(mean), strict=True))
    assert (shared["ids"], shared["output"], shared["gradient"], shared["lookup"]) == (3.0, 3.0, 3.0, 0.0)


def test_memory_counts_state_and_buffers(profile):
    topology = Topology(world_size=4, hardware=profile)
    model = CostModel([one_table(optimizer=OptimizerKind.ADAM)], topology, batch_size=100)
    size = model.rectangle_bytes(rectangle(500))[0]
    tables, ids, outputs = 500 * 64 * (4 + 8), 4 * 100 * (10 / 2 * 2 * 4 + 4), 4 * 100 * 64 * 8
    assert size == tables + ids + outputs


def test_sequences_send_one_row_per_id(profile):
    topology = Topology(world_size=2, hardware=profile)
    bags = load(CostModel([one_table()], topology, batch_size=10))
    sequence = load(CostModel([one_table(pooled=False)], topology, batch_size=10))
    assert phase(sequence, "output") == pytest.approx(10 * phase(bags, "output"))


def test_distinct_rows_across_nodes_by_hand(profile):
    def model(**options):
        topology = Topology(
            world_size=4, local_world_size=2, hardware=profile, across_nodes="rows", **options
        )
        return CostModel([one_table(weighted=True, wire=WireFormats(FP16, FP16))], topology, batch_size=100)

    plain, packed = model(), model(packed_ids=True)
    ids, bags = 4 * 100 * 10, 4 * 100
    distinct = 1000 * -math.expm1(-ids / 2 / 1000)  # of a node
    sent = plain.sent_bytes(rectangle())
    # Inside a node: half of all IDs with their weights and lengths, and half of all bags in fp32.
    assert sent["ids"].inside_N == pytest.approx((ids * 8 + bags * 4) / 2)
    assert sent["output"].inside_N == sent["gradient"].inside_N == bags * 64 * 4 / 2
    # Across: what the other node asks for.
    assert sent["ids"].across_N == pytest.approx(distinct * 4)
    assert sent["output"].across_N == sent["gradient"].across_N == pytest.approx(distinct * 64 * 2)
    few = packed.sent_bytes(rectangle())
    assert few["ids"].across_N == pytest.approx(distinct * packed_id_bytes(1000, distinct))
    assert few["output"] == sent["output"]
    saved = (sent["ids"].across_N - few["ids"].across_N).item() / 2.5e8
    work = 2 * 2 * distinct * profile.scan_id_seconds
    assert phase(load(plain), "ids") - phase(load(packed), "ids") == pytest.approx(saved - work)
    # The search cuts tables by rows, and relies on costs in proportion to them.
    for each in (plain, packed):
        assert load(each, rows=800) + load(each, rows=0) == pytest.approx(2 * load(each, rows=400), rel=1e-3)


def test_each_way_is_priced_with_its_wire_format(profile):
    topology = Topology(world_size=4, hardware=profile, sum_in_node=False)
    elements = 4 * 100 * 64
    full = CostModel([one_table()], topology, batch_size=100)
    mixed = CostModel([one_table(wire=WireFormats(FP16, SCALED))], topology, batch_size=100)
    before, loads = load(full), load(mixed)
    sent = elements * 0.75 / 1e9  # seconds for a byte of each element
    # Two bytes less travel; the own quarter is copied, and what arrives is read, in two bytes less.
    less = 2 * sent + elements * (2 + 2 * 2 / 4) / 2e10
    assert phase(before, "output") - phase(loads, "output") == pytest.approx(less)
    assert phase(before, "lookup") - phase(loads, "lookup") == pytest.approx(elements * 2 / 2e10)
    # One byte for a value and four for a row in place of four for a value; encoding reads and writes.
    row = 64 + 4
    coding = 2 * (elements * 4 + 4 * 100 * row) / 2e10
    less = 4 * sent - 4 * 100 * row * 0.75 / 1e9 - coding
    assert phase(before, "gradient") - phase(loads, "gradient") == pytest.approx(less)
    freed = full.rectangle_bytes(rectangle()) - mixed.rectangle_bytes(rectangle())
    assert freed == 4 * 100 * (64 * 2 - row)  # the encoded gradient lies beside the other
    sent = mixed.sent_bytes(rectangle())
    assert [sent[way].inside_N.tolist() for way in ("output", "gradient")] == [
        [3 * 100 * 64 * 2],
        [3 * 100 * row],
    ]
    assert not any(each.across_N.any() for each in sent.values())


def test_sequences_take_one_hop_also_in_nodes(profile):
    topology = Topology(world_size=4, local_world_size=2, hardware=profile)
    model = CostModel([one_table(pooled=False)], topology, batch_size=100)
    ids = 4 * 100 * 10 * 0.5
    expected = ids * 64 * 4 * (0.25 / 1e9 + 0.5 / 2.5e8 + 2.5 / 2e10)
    assert phase(load(model, rows=500, in_node=YES), "output") == pytest.approx(expected)


def test_batch_size_must_be_positive(profile):
    with pytest.raises(ValueError, match=r"batch_size.*0"):
        CostModel([one_table()], Topology(world_size=2, hardware=profile), batch_size=0)


def test_hashed_keys_cost_an_index(profile):
    topology = Topology(world_size=4, local_world_size=2, hardware=profile)
    fixed, hashed = (CostModel([one_table(index_bytes=each)], topology, batch_size=100) for each in (0, 20))
    ids = 4 * 100 * 10
    distinct = 1000 * -np.expm1(-ids / 1000)
    index = ids * profile.update_id_seconds + distinct * (1e-8 + 64 / 1e10)
    more = load(hashed) - load(fixed)
    assert phase(more, "lookup") == pytest.approx(index)
    assert phase(more, "ids") > 0  # keys travel as 64 bits
    assert phase(more, "update") == 0
    np.testing.assert_allclose(
        load(hashed, rows=250) + load(hashed, rows=750), load(hashed) + load(hashed, rows=0)
    )
    more = (hashed.rectangle_bytes(rectangle(500)) - fixed.rectangle_bytes(rectangle(500))).item()
    assert more == pytest.approx(500 * 20 + 2 * 4 * ids / 2)
    assert one_table(index_bytes=20).num_bytes == one_table().num_bytes + 20_000
