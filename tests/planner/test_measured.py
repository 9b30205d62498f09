import pytest

from meshrec.planner.measured import PhaseTime, compare, compare_pipelined, read_phases, write_phases


def test_a_pipelined_run_is_compared_by_its_whole_exchanges(tmp_path):
    hidden, whole = PhaseTime("ids", 0, 0.1, 1), PhaseTime("ids", 0, 0.4, 2)
    write_phases(tmp_path / "phases.jsonl", [hidden])
    assert read_phases(tmp_path) == [hidden]
    write_phases(tmp_path / "phases_whole.jsonl", [whole])
    assert read_phases(tmp_path) == [whole]
    assert read_phases(tmp_path / "phases.jsonl") == [hidden]


def test_measurements_survive_their_file(tmp_path):
    times = [PhaseTime("ids", 0, 0.5), PhaseTime("dense", 1, 2.0, step=3)]
    write_phases(tmp_path / "phases.jsonl", times[:1])
    write_phases(tmp_path / "phases.jsonl", times[1:])
    assert read_phases(tmp_path) == read_phases(tmp_path / "phases.jsonl") == times


def test_the_slowest_ranks_median_counts_for_a_phase(small_plan):
    predicted = small_plan.estimate().phases
    times = [PhaseTime("ids", 0, seconds, step) for step, seconds in enumerate([9.0, 1.0, 1.0])]
    times += [PhaseTime("ids", 1, 2.0), PhaseTime("lookup", 0, 4 * predicted["lookup"])]
    ids, lookup, _ = compare(small_plan, times)
    assert (ids.phase, ids.predicted, ids.measured) == ("ids", predicted["ids"], 2.0)
    assert lookup.error == pytest.approx(-0.75)


def test_a_step_does_not_count_the_wait_for_a_late_rank_twice(small_plan):
    """Rank 0 needs 3 s for its lookup, and rank 1 waits for it in the exchange; then the other way round."""
    one = [PhaseTime("lookup", 0, 3.0), PhaseTime("output", 0, 1.0)]
    other = [PhaseTime("lookup", 1, 1.0), PhaseTime("output", 1, 3.0), PhaseTime("dense", 1, 9.0)]
    swapped = [time._replace(rank=1 - time.rank, step=1) for time in one + other]
    *_, step = compare(small_plan, one + other + swapped)
    assert (step.phase, step.measured) == ("step", 4.0)


def test_a_pipelined_step_hides_the_travel_of_ids(small_plan):
    estimate = small_plan.estimate()
    travel, phases = estimate.id_travel_seconds, estimate.phases
    assert 0 < travel <= phases["ids"]
    local = phases["lookup"] + phases["update"]
    assert estimate.pipelined_seconds() == pytest.approx(estimate.seconds - min(travel, local))
    assert estimate.pipelined_seconds(1e9) == pytest.approx(estimate.seconds - travel)
    whole = [PhaseTime("ids", 0, 0.4), PhaseTime("dense", 0, 1e9)]
    hidden = [PhaseTime("ids", 0, 0.1), PhaseTime("lookup", 0, 0.2), PhaseTime("dense", 0, 5.0)]
    row = compare_pipelined(small_plan, whole, hidden)
    assert row.phase == "step, pipelined"
    assert row.predicted == pytest.approx(estimate.seconds - travel)
    assert row.measured == pytest.approx(0.3)


def test_bad_files_are_named(tmp_path, small_plan):
    path = tmp_path / "phases.jsonl"
    path.write_text('{"phase": "ids", "rank": 0, "seconds": 1}\n{"phase": "ids"}\n')
    with pytest.raises(ValueError, match=r"phases.jsonl:2"):
        read_phases(path)
    path.write_text('{"phase": "lunch", "rank": 0, "seconds": 1}\n')
    with pytest.raises(ValueError, match=r"phases.jsonl:1.*'lunch'.*\['ids'"):
        read_phases(path)
    with pytest.raises(ValueError, match="recorded"):
        compare(small_plan, [])
