"""Train a run on a stream, on one rank; see worker.py for runs on bounded data."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from meshrec.comms.agreement import together
from meshrec.data.encoding import Encoding
from meshrec.data.features import TimedFeatures
from meshrec.data.folder_join import open_join
from meshrec.data.joined_stream import JoinedStream
from meshrec.data.locations import without_secrets
from meshrec.data.open_stream import open_stream, stream_dataset
from meshrec.data.streams import Stream
from meshrec.runs.fitting import features_in, features_of, store_columns, stored_columns
from meshrec.runs.job import Job
from meshrec.runs.live_page import live_page
from meshrec.runs.same_start import compare_ranks, describe_dataset
from meshrec.runs.worker import RankRun, run_rank
from meshrec.train.feature_drift import drift_of
from meshrec.train.observers import Event, Logged, Observer, Reported
from meshrec.train.recipe import Recipe, TableSource
from meshrec.train.run_folder import CONFIG, JOINED, RunFolder
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
    if not isinstance(source, TableSource):
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


def check_labels(job: Job) -> None:
    """Check the options of labels that come later.

    Raises:
        ValueError: an option is missing, is not used, or does not fit the recipe.
    """
    options, source = job.label_options, job.recipe.data
    assert job.stream is not None
    assert job.stream_options is not None
    assert isinstance(source, TableSource)
    if job.actions is None:
        if given := options.given():
            raise ValueError(
                f"{_words(given)}: the option is of the join with actions, and there are none. Name them: "
                "--actions ADDRESS."
            )
        return
    required = {"time": job.stream_options.time, "key": options.key, "window_seconds": options.window_seconds}
    if missing := [name for name, value in required.items() if value is None]:
        address = without_secrets(job.actions)
        raise ValueError(f"--actions {address}: {_words(missing)} must be given with it.")
    if job.store is not None:
        raise ValueError(
            f"--out is {without_secrets(job.store)}, and the join of labels needs the run in a folder. Give "
            "a mounted folder, or join with `meshrec join`, and follow its output."
        )
    labels = [label.column for label in source.features.labels]
    if len(labels) != 1:
        raise ValueError(
            f"the recipe has the labels {labels}, and --actions gives one label. Leave one of them."
        )
    at_once = options.negatives == "at_once"
    if getattr(job.recipe.loss, "fake_negative_weighting", False) != at_once:
        advice = "--loss.fake-negative-weighting" if at_once else "--loss.no-fake-negative-weighting"
        raise ValueError(
            f"negatives is {options.negatives!r}: with at_once, and only then, a positive row has a negative "
            f"row before it, which the loss must weight. Add {advice}."
        )


def _words(names: list[str]) -> str:
    """Return names of options as words of the command line."""
    return " and ".join(f"--{name.replace('_', '-')}" for name in names)


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
        check_labels(job)
        # All ranks follow the folder that rank 0 writes.
        joined = Path(self._ranks.broadcast(str(self._folder.path.resolve()))) / JOINED
        features = features_in(self._folder, self._ranks, self._fit)
        with together(self._ranks.axis, "opening the stream"):
            options, source = job.stream_options, job.recipe.data
            assert isinstance(source, TableSource)
            timed: Encoding = features
            if options.time is not None:
                timed = TimedFeatures(features, options.time, options.time_unit)
            if job.actions is None:
                stream: Stream = open_stream(
                    job.stream,
                    timed,
                    on_error=source.on_error,
                    set_aside=options.set_aside,
                    step_log=self._folder.steps,
                )
            else:
                stream = self._open_joined(timed, joined)
        if self._ranks.is_first:
            self._observers.append(self._keep_columns(stream))
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
            drift=drift_of(features),
            after_roll_back=job.after_roll_back,
        )

    def _open_joined(self, features: Encoding, folder: Path) -> JoinedStream:
        """Open a stream of impressions whose labels come later.

        Args:
            features: fitted features that encode the labelled rows.
            folder: folder for the labelled rows.
        """
        job = self._job
        options, source = job.stream_options, job.recipe.data
        assert job.stream is not None
        assert job.actions is not None
        assert options is not None
        assert options.time is not None
        assert isinstance(source, TableSource)
        aside = options.set_aside
        if aside is not None:
            aside.mkdir(parents=True, exist_ok=True)
        join = open_join(
            job.label_options,
            job.stream,
            job.actions,
            folder,
            time=options.time,
            time_unit=options.time_unit,
            label=source.features.labels[0].column,
            on_error=source.on_error,
            set_aside=None if aside is None else aside / "unlabelled.jsonl",
            features=features,
        )
        return JoinedStream(join, features, on_error=source.on_error, set_aside=aside)

    def _keep_columns(self, stream: Stream) -> Observer:
        """Store the column types of the stream, and return an observer that does so before checkpoints."""
        for run in (self._job.warm_start, self._folder):
            if run is not None and (earlier := stored_columns(run)) is not None:
                stream.column_types.add(earlier)
        stored = stored_columns(self._folder)

        def store() -> None:
            """Store the types, if they have changed."""
            nonlocal stored
            if (schema := stream.column_types.schema) != stored:
                store_columns(self._folder, schema)
                stored = schema

        def observe(event: Event) -> None:
            """Store the types with a metrics line, which comes before every checkpoint with new records."""
            if isinstance(event, Logged):
                store()

        # An earlier run's types are known before the first record, so that checkpoint 0 can be exported.
        store()
        return observe

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
        """Return no results of evaluations: the metrics of a stream are in the metrics lines.

        A run that was rolled back has failed: its user must decide how it continues.
        """
        error = trainer.rolled_back_because
        return {
            **({} if error is None else {"state": "failed", "error": error}),
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
