"""``meshrec fit``: fit the features of a recipe once, for any number of runs."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from meshrec.cli.arguments import HELP, check_output
from meshrec.cli.arguments import parse as parse_arguments
from meshrec.cli.on_ranks import on_ranks
from meshrec.cli.recipe_help import recipe_help
from meshrec.cli.run_options import RankOptions
from meshrec.cli.train import parse, split_recipe
from meshrec.comms.agreement import together
from meshrec.data.features.fit_folder import FILE, write_fit
from meshrec.train.ranks import Ranks
from meshrec.train.recipe import TableSource
from meshrec.train.recipes import full_name, resolve

_SECONDS_BETWEEN_LINES = 5.0
"""Seconds between two lines about progress."""


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
    num_workers: int = 2
    """Number of tasks at the same time; only with --on."""


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
    if options.on is not None:
        if options.num_workers < 1 or options.nproc != 1:
            raise ValueError(
                f"--num-workers {options.num_workers}, --nproc {options.nproc}: with --on, the first must be "
                "at least 1, and the second is not used."
            )
        _fit_on_engine(options, source, data)
        return 0

    def work(ranks: Ranks) -> None:
        """Fit on all ranks. Rank 0 writes the folder."""
        progress = _Progress(is_shown=ranks.is_first)
        fitted = data.fit_on_ranks(ranks.axis, progress)
        with together(ranks.axis, "writing the features"):
            if fitted is not None:
                _write(fitted, options.out, data, progress)

    return on_ranks("fit", arguments, work, nproc=options.nproc, device=options.device)


def _fit_on_engine(options: FitOptions, source: str, data: TableSource) -> None:
    """Fit on Ray or Dask, and write the folder.

    Args:
        options: command options.
        source: full recipe name.
        data: data of the recipe.
    """
    from meshrec.data.engines import dask_engine, ray_engine

    if options.on == "ray":
        from meshrec.cli.on_ray import connect

        connect(source)
        on_cluster = ray_engine(options.num_workers)
    else:
        on_cluster = dask_engine(options.num_workers)
    progress = _Progress(is_shown=True)

    def engine(function: Any, tasks: Iterable[Any]) -> Iterator[Any]:
        """Run tasks on the cluster, and show the share that is finished."""
        tasks = list(tasks)
        for number, result in enumerate(on_cluster(function, tasks), 1):
            progress(number / len(tasks))
            yield result

    _write(data.fit(engine), options.out, data, progress)


def _write(fitted: Any, folder: Path, data: TableSource, progress: "_Progress") -> None:
    """Write fitted features, and print a summary."""
    write_fit(fitted, folder, data.fit_options())
    tables = sum(feature.num_embeddings for feature in fitted.described())
    print(
        f"{folder}: {len(fitted.features)} features with {tables:,} rows in tables, fitted in "
        f"{progress.seconds():.1f} s\nnext: meshrec train RECIPE --data.fitted {folder}"
    )


class _Progress:
    """Prints the finished share of the fit and the remaining time, every few seconds.

    Args:
        is_shown: whether to print; False on ranks other than the first.
    """

    def __init__(self, *, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._start = self._last = time.monotonic()

    def __call__(self, share: float) -> None:
        now = time.monotonic()
        if self._is_shown and share > 0 and now - self._last > _SECONDS_BETWEEN_LINES:
            self._last = now
            remaining = (now - self._start) * (1 - share) / share
            print(f"fitting features: {share:.0%}, about {remaining:.0f} s left", file=sys.stderr)

    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._start
