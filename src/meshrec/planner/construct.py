"""Initial plans: round the fractional candidates of the relaxation, then place the largest pieces first.

"Relaxation" is the linear program in ``relaxation.py``, which gives a fractional number of tables per
candidate. Memory-balanced plans do not need it, and serve where memory is tight.
"""

import time

import numpy as np

from meshrec.planner.anneal import Annealer
from meshrec.planner.problem import Problem
from meshrec.planner.state import State, TablePlacement
from meshrec.planner.types import Bools, Floats, Ints

WORK_PER_RANK = 2
"""Work of computing a rank's load in the compiled loop, in array elements."""
# Bytes per rank in problems whose loads are bytes. The search minimizes memory there, so no placement may
# fail for lack of it.
_NO_CAP = 1e30
# Piece sizes to try for memory-balanced plans, as fractions of the memory cap, and the allowed factor over a
# table's minimum memory. Small pieces fill ranks evenly; large pieces need less memory in total.
_PIECE_FRACTIONS, _MEMORY_TOLERANCE = (0.25, 0.5, 0.75, 1.0, 0.1), 1.02
# Work in the first annealing attempt that balances memory, and the initial temperature.
_BALANCE_WORK, _BALANCE_START_TEMPERATURE = 2_000_000, 0.03
# Weights of memory as a phase: the seconds of a full rank, in mean step times. They grow until a plan fits.
_MEMORY_WEIGHTS = (4.0, 16.0, 64.0, 256.0)
# Initial temperature and fraction of the work for placing whole tables again, while a plan does not fit.
_SQUEEZE_TEMPERATURE, _SQUEEZE_SHARE = 0.005, 0.5
# Default time limit in seconds for annealing a plan until it fits.
_FITTING_SECONDS = 1.0
# Annealing is tried if a plan takes at most this multiple of the memory cap, up to this number of times.
# Every attempt does twice the work of the attempt before.
_ANNEAL_LIMIT, _ATTEMPTS = 1.5, 3


def candidates_by_type(problem: Problem, allowed_C: Bools) -> list[Ints]:
    """Return the indices of the allowed candidates (ways to split a table), per type of identical tables.

    If a type has no allowed candidate, all its candidates are returned, so that every table can be placed.
    """
    by_type = []
    for candidates in _split_by_type(problem):
        allowed = candidates[allowed_C[candidates]]
        by_type.append(allowed if len(allowed) else candidates)
    return by_type


def _split_by_type(problem: Problem) -> list[Ints]:
    """Return the indices of all candidates (ways to split a table), per type of identical tables."""
    candidates = np.arange(len(problem.type_C))
    return np.split(candidates, np.searchsorted(problem.type_C, np.arange(1, int(problem.type_C.max()) + 1)))


def round_choice(problem: Problem, num_tables_C: Floats) -> Ints:
    """Select a candidate per table by rounding the relaxation.

    For every type of identical tables, the relaxation gives a fractional table count per candidate (way to
    split a table). The counts are rounded down. Then the counts with the largest fractions are incremented
    until every table has a candidate.

    Returns:
        Candidate index per table, int64 [T].
    """
    choice_T = np.zeros(len(problem.type_T), np.int64)
    for kind, candidates in enumerate(_split_by_type(problem)):
        tables = np.flatnonzero(problem.type_T == kind)
        # The tolerance of the linear program may put an integer slightly below.
        counts = np.floor(num_tables_C[candidates] + 1e-6).astype(int)
        fraction = num_tables_C[candidates] - counts
        for index in np.argsort(-fraction, kind="stable")[: max(len(tables) - counts.sum(), 0)]:
            counts[index] += 1
        # An unsolved relaxation has zero shares.
        counts[int(np.argmax(num_tables_C[candidates]))] += max(len(tables) - counts.sum(), 0)
        choice_T[tables] = np.repeat(candidates, counts)[: len(tables)]
    return choice_T


def table_order(problem: Problem, choice_T: Ints) -> Ints:
    """Return table indices [T] in the order in which to place tables, those with the largest piece first.

    A piece is measured by its load in seconds, summed over phases, under the table's selected candidate
    (`choice_T`, int64 [T]).
    """
    size_C = problem.largest_load_CK().sum(axis=1)
    return np.argsort(-size_C[choice_T], kind="stable")


def construct(problem: Problem, num_tables_C: Floats, candidates_Y: list[Ints]) -> State | None:
    """Place every table with the candidate which the rounded relaxation suggests, largest pieces first.

    If a table does not fit into memory with this candidate, place it with the cheapest other candidate.

    Args:
        problem: planning problem.
        num_tables_C: tables per candidate in the relaxation, fractional.
        candidates_Y: candidate indices to use per type.

    Returns:
        The complete plan, or None if memory does not suffice.
    """
    choice_T = round_choice(problem, num_tables_C)
    # The relaxation's mean loads tell which phases will matter, before any table is placed.
    state = State(problem, num_tables_C @ problem.mean_load_CK())
    for table in table_order(problem, choice_T):
        rounded, alternatives = choice_T[table : table + 1], candidates_Y[problem.type_T[table]]
        if not assign_table(state, int(table), rounded) and not assign_table(state, int(table), alternatives):
            return None
    return state


def squeezed_plan(
    problem: Problem, num_tables_C: Floats, candidates_Y: list[Ints], max_work: float, deadline: float
) -> tuple[State | None, int]:
    """Construct a plan as `construct` does, without a memory limit, and anneal it until it fits into memory.

    Where memory is tight, placing one table after another leaves no room for the last ones. Here, the bytes
    of a rank are a phase of the step, like its loads in seconds. So tables make room for one another while
    the plan stays fast. The weight of this phase grows until the plan fits.

    Args:
        max_work: work limit, see `Effort`.
        deadline: ``time.perf_counter`` time after which annealing ends.

    Returns:
        The plan, or None if it does not fit or annealing is not available; and the work, see `Effort`.
    """
    mean_K = num_tables_C @ problem.mean_load_CK()
    plan: list[TablePlacement] | None = None
    work = 0
    for seed, weight in enumerate(_MEMORY_WEIGHTS):
        with_memory = _with_memory_phase(problem, weight * float(mean_K.sum()) / problem.memory_cap)
        seconds = deadline - time.perf_counter()
        if not Annealer.supports(with_memory) or seconds <= 0:
            break
        if plan is None:
            start = construct(with_memory, num_tables_C, candidates_Y)
            if start is None:  # a table has no place on the ranks that it may use
                break
            work, plan = start.work, start.plan
        plan, steps = Annealer(with_memory, candidates_Y).improve(
            plan,
            max_work=int(max_work / len(_MEMORY_WEIGHTS) / WORK_PER_RANK),
            seconds=seconds,
            start_temperature=_SQUEEZE_TEMPERATURE,
            placement_share=_SQUEEZE_SHARE,
            seed=seed,
        )
        work += WORK_PER_RANK * steps
        state = State.of(problem, plan)
        if state.fits():
            return state, work
    return None, work


def _with_memory_phase(problem: Problem, seconds_per_byte: float) -> Problem:
    """Return a problem without a memory limit, in which a rank's bytes are a further phase of its loads."""
    return problem._replace(
        memory_cap=_NO_CAP,
        common_cost_C=problem.common_cost_C + seconds_per_byte * problem.common_bytes_C,
        load_PK=np.column_stack((problem.load_PK, seconds_per_byte * problem.bytes_P)),
        fixed_PK=np.column_stack((problem.fixed_PK, seconds_per_byte * problem.fixed_bytes_P)),
        merge_FK=np.pad(problem.merge_FK, ((0, 1), (0, 1))),
    )


def assign_table(state: State, table: int, candidates: Ints) -> bool:
    """Place a table on the ranks and with the candidate (way to split it) that cost least.

    Args:
        state: plan under construction. The table is added in place, unless no candidate fits.

    Returns:
        Whether the table was placed.
    """
    weight_K = state.weights()
    attempts = [state.cheapest_placement(table, int(candidate), weight_K) for candidate in candidates]
    feasible = [placed for placed in attempts if placed is not None]
    if feasible:
        state.add(table, min(feasible, key=lambda placed: placed.objective).placement)
    return bool(feasible)


def fitting_plan(
    problem: Problem, allowed_C: Bools | None = None, seconds: float = _FITTING_SECONDS
) -> State | None:
    """Search for a plan that fits into memory, regardless of speed.

    Args:
        allowed_C: whether a candidate is allowed; None: all are.

    Returns:
        The plan, or None if none was found. Its loads are bytes instead of seconds, see `most_even_plan`.
    """
    state = most_even_plan(problem, allowed_C, seconds)
    return state if state.seconds <= problem.memory_cap else None


def most_even_plan(
    problem: Problem, allowed_C: Bools | None = None, seconds: float = _FITTING_SECONDS
) -> State:
    """Search for a plan that minimizes the fullest rank's bytes, and stop at the first plan that fits.

    A plan is constructed for every of several limits on the piece size. If none of these plans fits, they
    are improved by simulated annealing, the most even plan first.

    Args:
        allowed_C: whether a candidate is allowed; None: all are.

    Returns:
        The first plan that fits, or the plan with the smallest maximum. Its loads are bytes instead of
        seconds: `State.seconds` is the fullest rank's bytes.
    """
    deadline = time.perf_counter() + seconds
    # The same problem with bytes instead of seconds, as the only phase, to minimize memory.
    in_bytes = problem._replace(
        memory_cap=_NO_CAP,
        common_cost_C=problem.common_bytes_C,
        load_PK=problem.bytes_P[:, None],
        fixed_PK=problem.fixed_bytes_P[:, None],
    )
    fits_C = problem.can_fit_C() if allowed_C is None else allowed_C & problem.can_fit_C()
    starts: list[tuple[State, list[Ints]]] = []
    # Several piece sizes, because none is best for all inputs; all candidates come last.
    for some_C in (*(_lean_candidates(problem, fits_C, part) for part in _PIECE_FRACTIONS), fits_C):
        candidates_Y = candidates_by_type(problem, some_C)
        state = _spread(in_bytes, candidates_Y, problem.memory_cap)
        if state.seconds <= problem.memory_cap:
            return state
        starts.append((state, candidates_Y))
    # The most even plan is annealed first.
    starts.sort(key=lambda start: start[0].seconds)
    best = starts[0][0]
    for start, candidates_Y in starts:
        state = _annealed(start, candidates_Y, problem.memory_cap, deadline)
        best = min(best, state, key=lambda state: state.seconds)
        if best.seconds <= problem.memory_cap:
            break
    return best


def _lean_candidates(problem: Problem, fits_C: Bools, part: float) -> Bools:
    """Return a mask [C] of the candidates that have small pieces and need little memory in total.

    Among the candidates of a table type with small pieces, only those are kept which need nearly the minimum
    total memory.

    Args:
        part: maximum bytes per small piece, as a fraction of the memory cap. If a type has no candidate with
            such pieces, the candidates with the type's smallest pieces are used.
    """
    piece_C, mean_C = problem.piece_bytes_C(), problem.mean_bytes_C()
    # Candidates are sorted by type, so the last candidate has the largest type index.
    num_types = int(problem.type_C[-1]) + 1
    least_Y, lean_Y = np.full(num_types, np.inf), np.full(num_types, np.inf)
    np.minimum.at(least_Y, problem.type_C[fits_C], piece_C[fits_C])
    small_C = fits_C & (piece_C <= np.maximum(part * problem.memory_cap, least_Y[problem.type_C]))
    np.minimum.at(lean_Y, problem.type_C[small_C], mean_C[small_C])
    return np.asarray(small_C & (mean_C <= _MEMORY_TOLERANCE * lean_Y[problem.type_C]))


def _spread(in_bytes: Problem, candidates_Y: list[Ints], cap: float) -> State:
    """Construct a plan that spreads bytes evenly over ranks. Tables with large pieces are placed first."""
    state = State(in_bytes, np.array([float(cap)]))
    size_C = in_bytes.largest_load_CK()[:, 0]
    # Large pieces first: small pieces fill the gaps afterwards.
    for table in np.argsort([-size_C[candidates_Y[kind]].min() for kind in in_bytes.type_T], kind="stable"):
        assign_table(state, int(table), candidates_Y[in_bytes.type_T[table]])
    return state


def _annealed(state: State, candidates_Y: list[Ints], cap: float, deadline: float) -> State:
    """Return a plan with bytes spread more evenly, by annealing a plan that slightly exceeds `cap` bytes.

    The plan is returned unchanged if it fits, or is too far above the cap. The same holds after the deadline,
    and if annealing is not available.
    """
    for seed in range(_ATTEMPTS):
        seconds = deadline - time.perf_counter()
        # Annealing cannot close a large gap, and the time is then better spent on another start.
        if (
            not cap < state.seconds < _ANNEAL_LIMIT * cap
            or seconds <= 0
            or not Annealer.supports(state.problem)
        ):
            break
        # Every attempt works twice as long as the one before, with another seed.
        placements_T, _ = Annealer(state.problem, candidates_Y).improve(
            state.plan,
            max_work=_BALANCE_WORK << seed,
            seconds=seconds,
            start_temperature=_BALANCE_START_TEMPERATURE,
            seed=seed,
        )
        state = State.of(state.problem, placements_T)
    return state
