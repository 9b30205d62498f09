"""``meshrec recommend``: write the best items for users, from a next-item run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from meshrec.cli.arguments import TABLES, Words, check_output, parse
from meshrec.cli.on_ranks import on_ranks
from meshrec.cli.run_options import RankOptions, RunOptions
from meshrec.train.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class RecommendOptions(RunOptions, RankOptions):
    """Write the best items for users: a row per recommendation with user, rank, item and score.

    Histories come from the run's log, held-out items included, or from another log.
    """

    out: Path
    """File to write: .parquet or .csv."""
    users: Path | None = None
    """Parquet or CSV file with a user column, named as in the log; duplicates count once. None: all users in
    the log.
    """
    k: Annotated[int, tyro.conf.arg(aliases=("-k",))] = 10
    """Number of items per user."""
    data: Words = ()
    """Another log with the histories, with the columns of the run's log; none: the run's log."""
    keep_seen: bool = False
    """Also recommend items from a user's history. Default: leave them out, unless the recipe has
    exclude_seen=False, as `meshrec inspect` proposes for logs in which users repeat items.
    """
    new_only: bool = False
    """Leave out items from a user's history, regardless of the recipe."""
    force: bool = False
    """Replace an existing file."""


def main(arguments: Sequence[str]) -> int:
    options = parse(RecommendOptions, arguments, program="meshrec recommend")
    check_output(options.out, force=options.force, suffixes=TABLES)
    if options.keep_seen and options.new_only:
        raise ValueError("--keep-seen and --new-only contradict each other. Leave one of them out.")
    # None: as in the recipe.
    keep_seen = options.keep_seen or (False if options.new_only else None)
    if options.k < 1:
        raise ValueError(f"-k is {options.k}; it must be at least 1.")
    run = options.folder()

    def work(ranks: Ranks) -> None:
        """Find the best items on all ranks. Rank 0 writes the file."""
        from meshrec.runs.recommending import load_recommender, recommendations, write_recommendations

        recommender = load_recommender(
            run,
            ranks,
            users=options.users,
            data=options.data or None,
            step=options.step,
            last=options.last,
        )
        best = recommendations(recommender, ranks, options.k, keep_seen=keep_seen)
        if not ranks.is_first:
            # Only rank 0 writes, but scoring is collective, so other ranks must exhaust the iterator.
            for _ in best:
                pass
            return
        num_rows = write_recommendations(options.out, recommender, best)
        have = "user has" if recommender.num_unknown == 1 else "users have"
        unknown = f"; {recommender.num_unknown:,} {have} no history" if recommender.num_unknown else ""
        print(
            f"{options.out}: {num_rows:,} recommendations for {len(recommender.users):,} users, by the "
            f"weights of step {recommender.step} of {run.path}{unknown}"
        )

    return on_ranks("recommend", arguments, work, nproc=options.nproc, device=options.device)
