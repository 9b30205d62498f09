"""``meshrec recommend``: write the best items for users, by a run of next items."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from meshrec.cli.arguments import Words, parse
from meshrec.cli.on_ranks import on_ranks
from meshrec.cli.output import check_output
from meshrec.train.ranks import Ranks
from meshrec.train.run_folder import RUNS, find_run


@dataclass(frozen=True, kw_only=True)
class RecommendOptions:
    """Write the best items for users: a row with user, rank, item and score for each recommendation.

    The histories are those of the run's log, held-out items included, or of another log.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Name or folder of a run. The weights that it reports are used."""
    out: Path
    """File to write: .parquet or .csv."""
    users: Path | None = None
    """Parquet or CSV file with a column of users, called as in the log; each counts once. If none, all users
    of the log.
    """
    k: Annotated[int, tyro.conf.arg(aliases=("-k",))] = 10
    """Number of items for each user."""
    data: Words = ()
    """Another log that has the histories, with the columns of the run's log; if none, the run's log."""
    keep_seen: bool = False
    """Recommend items that a user has had, too."""
    force: bool = False
    """Replace a file that exists."""
    step: int | None = None
    """Use the checkpoint of this step instead."""
    last: bool = False
    """Use the run's last checkpoint instead of its best one."""
    nproc: int = 1
    """Number of ranks on this machine; it may differ from the run's."""
    device: str | None = None
    """Device: cpu or cuda; if none, cuda where torch sees a GPU."""
    trust: bool = False
    """Execute the recipe's source in the run's folder even if another user trained the run."""
    runs: Path = RUNS
    """Folder of all run folders."""


def main(arguments: Sequence[str]) -> int:
    options = parse(RecommendOptions, arguments, program="meshrec recommend")
    check_output(options.out, force=options.force)
    if options.k < 1:
        raise ValueError(f"-k is {options.k}; it must be at least 1.")
    run = find_run(options.run, options.runs, trust=options.trust)

    def work(ranks: Ranks) -> None:
        from meshrec.runs.recommending import load_recommender, recommendations, write_recommendations

        found = load_recommender(
            run,
            ranks,
            users=options.users,
            data=options.data or None,
            step=options.step,
            last=options.last,
        )
        best = recommendations(found, ranks, options.k, keep_seen=options.keep_seen)
        if not ranks.is_first:
            for _ in best:
                pass
            return
        num_rows = write_recommendations(options.out, found, best)
        have = "user has" if found.num_unknown == 1 else "users have"
        unknown = f"; {found.num_unknown:,} {have} no history" if found.num_unknown else ""
        print(
            f"{options.out}: {num_rows:,} recommendations for {len(found.users):,} users, by the weights of "
            f"step {found.step} of {run.path}{unknown}"
        )

    return on_ranks("recommend", arguments, work, nproc=options.nproc, device=options.device)
