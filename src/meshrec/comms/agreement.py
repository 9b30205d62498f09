"""Agree on errors: if an operation fails on any rank, all ranks raise the same error.

[Note: how errors reach every rank]

If a single rank raises, the other ranks wait in the next collective until the timeout. An operation that
may fail on some ranks, such as reading a file or checking a batch, therefore catches every exception and
shares it in a small collective. Then all ranks raise together:

- here, `together` runs a block without collectives, and `raise_as_one` exchanges caught errors;
- `agreed` exchanges a function's results or errors (checkpoint/agreement.py);
- a lookup sends the input status together with the sizes, without an extra collective
  (distributed/input_dist.py);
- the train pipeline sends a word per batch in the background (pipeline/lookahead.py);
- stages send an error instead of a value (stages/messages.py);
- resharding agrees on the rows per round (distributed/reshard.py);
- the trainer exchanges two flags per step (train/stopping.py), and reports or stores the step only
  afterwards.

Whether a rank has failed never depends on the exception type, which may differ between torch versions and
between ranks. The ranks agree on a common type afterwards.

Where an agreement would cost a collective per step, a rank announces the error instead:
[Note: a rank that fails alone] in comms/failures.py.

A dead rank cannot report. The peers see closed sockets or a timeout, and the launcher reports the error from
the first rank to fail (train/launch.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from meshrec.comms.collectives import gather_objects
from meshrec.comms.failures import KINDS, combined_error, sendable
from meshrec.comms.mesh import Axis
from meshrec.plan.sharding_plan import ShardingPlan


@contextmanager
def together(axis: Axis, name: str) -> Iterator[None]:
    """Context: run a block on all ranks, and if it raises on any rank, raise on all ranks. Collective.

    The block must not contain collectives, because a failing rank would not reach them::

        with together(env.world, "reading files"):
            data = path.read_bytes()

    Args:
        name: name of the operation. Error messages contain it if the exchange of errors itself fails.

    Raises:
        Exception: see `raise_as_one`.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    try:
        raise_as_one(error, axis, name)
    finally:
        del error  # traceback and frame form a reference cycle, which would keep the block's tensors alive


def raise_as_one(error: Exception | None, axis: Axis, name: str) -> None:
    """Raise on every rank if any rank passes an error. Collective.

    Args:
        error: this rank's error, or None.

    Raises:
        Exception: the error itself if ``axis`` has a single rank, otherwise the result of `combined_error`.
    """
    try:
        if axis.size > 1:
            # With ``from``, the traceback on this rank also shows the error raised here.
            if errors := gather_errors(error, axis, name):
                raise combined_error(errors, axis.size) from error
        elif error is not None:
            raise error
    finally:
        del error  # as in `together`


def gather_errors(
    error: Exception | None, axis: Axis, name: str, kinds: Sequence[type[Exception]] = KINDS
) -> dict[int, Exception]:
    """Return the errors of all ranks, by rank. Ranks without an error are missing. Collective.

    Args:
        error: this rank's error, or None.
    """
    # Exceptions with other types may not survive pickling, or may have a class other ranks cannot import.
    local_error = None if error is None else sendable(error, kinds)
    errors = gather_objects(local_error, axis, name)
    return {rank: error for rank, error in enumerate(errors) if error is not None}


def verify_same_plan(plan: ShardingPlan, group: dist.ProcessGroup | None) -> None:
    """Check that all ranks in ``group`` have the same plan. Collective.

    Args:
        plan: this rank's plan.
        group: the ranks; None for a single process.

    Raises:
        ValueError: the plans differ. All ranks raise the same message.
    """
    # A single rank cannot disagree.
    if group is None or group.size() == 1:
        return
    axis = Axis(size=group.size(), rank=group.rank(), group=group)
    # Arguments with a wrong type are rejected after this exchange, so no rank waits alone.
    # Compare digests first: plans are large, and usually equal.
    digest = plan.digest() if isinstance(plan, ShardingPlan) else ""
    if len(set(gather_objects(digest, axis, "digests of plans"))) == 1:
        return
    # All ranks see the same digests, so all reach this collective.
    parts = {(path, table): sharding.digest() for path, table, sharding in plan.tables()}
    raise ValueError(_difference(gather_objects(parts, axis, "plans")))


def _difference(tables_by_rank: Sequence[Mapping[tuple[str, str], str]]) -> str:
    """Return an error message about the first table for which two ranks have different plans."""
    # Rank 0 is the reference.
    for rank, other in enumerate(tables_by_rank):
        for key in sorted({*tables_by_rank[0], *other}):
            if tables_by_rank[0].get(key) != other.get(key):
                path, table = key
                missing_on = [f"rank {r}" for r in (0, rank) if key not in tables_by_rank[r]]
                reason = (
                    f"it is missing on {missing_on[0]}"
                    if missing_on
                    else f"ranks 0 and {rank} place it differently"
                )
                return (
                    f"the ranks hold different plans: table {table!r} of module {path!r}: {reason}. Make the "
                    "plan on one rank and broadcast it (EmbeddingShardingPlanner.collective_plan does)."
                )
    # Not reachable: the digest of a plan covers all tables.
    raise AssertionError("digests differ, plans do not")
