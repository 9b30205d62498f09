"""Train a run on a stream, on one rank; see worker.py for runs on bounded data."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from meshrec.comms.agreement import together
from meshrec.data.encoding import Encoding
from meshrec.data.features import TimedFeatures
from meshrec.data.locations import without_secrets
from meshrec.data.open_stream import open_stream, stream_dataset
from meshrec.runs.fitting import features_in, features_of
from meshrec.runs.job import Job
from meshrec.runs.live_page import live_page
from meshrec.runs.same_start import compare_ranks, describe_dataset
from meshrec.runs.worker import RankRun, run_rank
from meshrec.train.observers import Observer, Reported
from meshrec.train.recipe import RawSource, Recipe, TableSource
from meshrec.train.run_folder import CONFIG, RunFolder
from meshrec.train.stopping import StopRequest
from meshrec.train.stream_trainer import StreamTrainer

if TYPE_CHECKING:
    from meshrec.data.features import Features


def follow_rank(job: Job, screen: Callable[[RunFolder], Observer]) -> dict[str, Any]:
    """Train a recipe on a stream on this rank; see `run_rank`. Collective.

    Args:
        job: recipe and run options, with a stream.
        screen: function creating the observer for the user's screen; called on rank 0 only.
    """
    return run_rank(job, screen, StreamRun)


def check_source(recipe: Recipe, earlier: RunFolder | None) -> None:
    """Check that a recipe's features can read a stream, with the fit of an earlier run if there is one.

    Raises:
        ValueError: samples need more than one record, or the features are not those of the earlier run.
    """
    source = recipe.data
    if not isinstance(source, RawSource) or not isinstance(source, TableSource):
        raise ValueError(
            f"recipe {recipe.name!r} has the data source {type(source).__name__}, whose samples are not "
            "single records. A stream needs features of columns, such as those of Parquet or Csv."
        )
    if earlier is None:
        return
    features, before = source.features, features_of(earlier)
    names, names_before = ([feature.name for feature in fitted.features] for fitted in (features, before))
    differing = [*(set(names) ^ set(names_before)), *features.changed_since(before)]
    if names != names_before or differing:
        raise ValueError(
            f"the features of {earlier.path} are {names_before}, and the recipe has {names}; they differ in "
            f"{sorted(differing) or 'order'}. Train a run on the new features first: `meshrec train --from`, "
            "and start from that run."
        )


class StreamRun(RankRun):
    """Training run on a stream, on one rank. Arguments are those of `RankRun`."""

    @override
    def run(self) -> dict[str, Any]:
        options = self._job.stream_options
        assert options is not None
        with ExitStack() as stack:
            if options.page is not None:
                with together(self._ranks.axis, "opening the page"):
                    if self._ranks.is_first:
                        page = live_page(self._folder, options.page, server=options.page_server)
                        self._notify(Reported(f"page: {stack.enter_context(page)}"))
            return super().run()

    def _make_trainer(self, stop: StopRequest) -> StreamTrainer:
        job = self._job
        assert job.stream is not None
        assert job.stream_options is not None
        check_source(job.recipe, job.warm_start)
        features = features_in(self._folder, self._ranks, self._fit)
        with together(self._ranks.axis, "opening the stream"):
            options, source = job.stream_options, job.recipe.data
            assert isinstance(source, TableSource)
            timed: Encoding = features
            if options.time is not None:
                timed = TimedFeatures(features, options.time, options.time_unit)
            stream = open_stream(
                job.stream,
                timed,
                on_error=source.on_error,
                set_aside=options.set_aside,
                step_log=self._folder.steps,
            )
        dataset = stream_dataset(stream, features, epoch_samples=self._epoch_samples())
        compare_ranks(self._ranks, describe_dataset(dataset), "have opened different streams")
        return StreamTrainer(
            job.recipe,
            dataset,
            stream,
            self._ranks,
            name=without_secrets(job.stream),
            options=options,
            folder=self._folder,
            observer=self._notify,
            stop=stop,
            profile=job.profile,
            store=self._store,
        )

    def _epoch_samples(self) -> int:
        """Return the number of training samples of the run from which this one started; 0: none."""
        # A resumed run has the number in its own configuration.
        for run in (self._folder, self._job.warm_start):
            data = {} if run is None else (run.read_json(CONFIG) or {}).get("data", {})
            if num := data.get("samples", {}).get("train"):
                return int(num)
        return 0

    def _fit(self) -> "Features":
        """Return the fitted features: those of the earlier run, or fitted on the recipe's data."""
        if self._job.warm_start is not None:
            return features_of(self._job.warm_start)
        source = self._job.recipe.data
        assert isinstance(source, TableSource)
        features: Features = source.features
        # Features that need no fit also need no data.
        return features if features.is_fitted and source.fitted is None else source.fit()

    def _extend(self, trainer: Any, summary: dict[str, Any], stop: StopRequest) -> None:
        """Add nothing, because explanations and refits need data."""

    def _results(self, trainer: Any) -> dict[str, Any]:
        """Return no results of evaluations: the metrics of a stream are in the metrics lines."""
        return {
            "best_step": trainer.progress.step,
            "weights_step": trainer.progress.step,
            "validation": {},
            "test": {},
            "evaluated_users": {},
            "curves": {},
            "dense_precision": {"used": "bf16" if trainer.precision.bf16 else "fp32"},
            "best_possible_auc": None,
            "held_back": 0,
        }

    def _merge_skipped(self, by_rank: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
        """Add the counts of omitted rows of all ranks, which read different rows."""
        merged: dict[str, Counter[str]] = {}
        for of_rank in by_rank:
            for file, reasons in of_rank.items():
                merged.setdefault(file, Counter()).update(reasons)
        return {file: dict(reasons) for file, reasons in merged.items()}
