"""``meshrec fit``: fit the features of a recipe once, for any number of runs."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from meshrec.cli.arguments import HELP, check_output
from meshrec.cli.arguments import parse as parse_arguments
from meshrec.cli.on_ranks import on_ranks
from meshrec.cli.progress import shown_progress
from meshrec.cli.recipe_help import recipe_help
from meshrec.cli.run_options import RankOptions
from meshrec.cli.train import parse, split_recipe
from meshrec.comms.agreement import together
from meshrec.data.features.fit_folder import FILE, write_fit
from meshrec.train.ranks import Ranks
from meshrec.train.recipe import TableSource
from meshrec.train.recipe_files import full_name, resolve

_TASK = "fitting features"
"""Name of the task in lines about progress."""


@dataclass(frozen=True, kw_only=True)
class FitOptions(RankOptions):
    """Fit the features of a recipe on its training rows: vocabularies, bucket edges, means and others.

    RECIPE and its options are those of `meshrec train`. The data must be Parquet, Csv or Frame.

    Then: meshrec train RECIPE --data.fitted FOLDER
    """

    out: Path
    """Folder for the features."""
    force: bool = False
    """Replace features in the folder."""
    on: Literal["ray", "dask"] | None = None
    """Fit on a cluster: Ray's at RAY_ADDRESS, or Dask's at DASK_SCHEDULER_ADDRESS; none: on ranks."""
    num_workers: int | None = None
    """Number of tasks at the same time, only with --on; none: 2."""


def main(arguments: Sequence[str]) -> int:
    """Fit the features, and return the exit code."""
    name, words = split_recipe(arguments)
    if name is None:
        # An error, or the help of the command.
        parse_arguments(FitOptions, words, program="meshrec fit RECIPE")
        raise ValueError("no recipe was given. Name one: meshrec fit RECIPE --out FOLDER.")
    source = full_name(name)
    recipe = resolve(source)
    if any(word in HELP for word in words):
        summary = "Fit the features of this recipe once, for any number of runs."
        print(recipe_help(f"meshrec fit {source}", recipe, FitOptions, summary=summary))
        return 0
    options, recipe = parse(source, words, recipe, kind=FitOptions, command="fit")
    data = recipe.data
    if not isinstance(data, TableSource):
        raise ValueError(
            f"the data of {source} is {type(data).__name__}; this command fits features for Parquet, Csv and "
            "Frame. Runs on other data fit what they need when they start."
        )
    if data.fitted is not None:
        raise ValueError(
            f"--data.fitted {data.fitted} names features that are fitted already. Leave it out to fit anew."
        )
    check_output(options.out / FILE if options.out.is_dir() else None, force=options.force)
    if options.on is None and options.num_workers is not None:
        raise ValueError(
            f"--num-workers {options.num_workers} needs --on ray or --on dask. For ranks, use --nproc."
        )
    num_workers = 2 if options.num_workers is None else options.num_workers
    if options.on is not None:
        if num_workers < 1 or options.nproc != 1:
            raise ValueError(
                f"--num-workers {num_workers}, --nproc {options.nproc}: with --on, the first must be "
                "at least 1, and the second is not used."
            )
        _fit_on_engine(options, num_workers, source, data)
        return 0

    def work(ranks: Ranks) -> None:
        """Fit on all ranks. Rank 0 writes the folder."""
        start = time.monotonic()
        with shown_progress(_TASK) if ranks.is_first else nullcontext(_ignore) as progress:
            fitted = data.fit_on_ranks(ranks.axis, progress)
        with together(ranks.axis, "writing the features"):
            if fitted is not None:
                _write(fitted, options.out, data, time.monotonic() - start)

    return on_ranks("fit", arguments, work, nproc=options.nproc, device=options.device)


def _fit_on_engine(options: FitOptions, num_workers: int, source: str, data: TableSource) -> None:
    """Fit on Ray or Dask, and write the folder."""
    from meshrec.data.engines import dask_engine, ray_engine

    if options.on == "ray":
        from meshrec.cli.on_ray import connect

        connect(source)
        on_cluster = ray_engine(num_workers)
    else:
        on_cluster = dask_engine(num_workers)
    start = time.monotonic()
    with shown_progress(_TASK) as progress:

        def engine(function: Any, tasks: Iterable[Any]) -> Iterator[Any]:
            """Run tasks on the cluster, and show the share that is finished."""
            tasks = list(tasks)
            for number, result in enumerate(on_cluster(function, tasks), 1):
                progress(number / len(tasks))
                yield result

        fitted = data.fit(engine)
    _write(fitted, options.out, data, time.monotonic() - start)


def _ignore(share: float) -> None:
    """Show no progress, on ranks other than the first."""


def _write(fitted: Any, folder: Path, data: TableSource, seconds: float) -> None:
    """Write features that were fitted in some seconds, and print a summary."""
    write_fit(fitted, folder, data.fit_options())
    tables = sum(feature.num_embeddings for feature in fitted.described())
    print(
        f"{folder}: {len(fitted.features)} features with {tables:,} rows in tables, fitted in "
        f"{seconds:.1f} s\nnext: meshrec train RECIPE --data.fitted {folder}"
    )
