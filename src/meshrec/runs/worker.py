"""Train a run on one rank, from joining the process group to the last report.

[Note: who closes what at the end of a run]

Whoever opens something closes it, in reverse order, also after an error:

1. ``Trainer`` closes everything a step uses: the prefetch thread at the end of every epoch, together with the
   batches in flight, and the profiler. Then it waits for the background checkpoint, and saves the last
   checkpoint.
2. ``RankRun.run`` ends the observers with the event ``Finished``, after rank 0 has written summary and
   report. It returns only when all ranks have arrived, so that no rank ends while another waits for it.
3. ``run_rank`` writes an error to the rank's file before it closes anything. Closing the process group makes
   the other ranks fail, too, and the launcher must find the first cause.
4. ``_log_to_folder`` releases the rank's lock and the log file; ``locked_folder`` releases the folder lock.
5. ``leave_process_group`` comes last: it closes the links between ranks, which wait until the others have
   read, and then the sockets.

The launcher removes the ranks' store, and kills ranks that do not end (train/launch.py).
"""

import json
import logging
import os
import socket
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from shlex import quote
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from meshrec.checkpoint import find_checkpoint
from meshrec.checkpoint.finding import BEST, CHECKPOINTS
from meshrec.checkpoint.random_state import seed_python_and_numpy
from meshrec.comms.agreement import together
from meshrec.comms.collectives import named_failure
from meshrec.comms.leaving import leave_process_group
from meshrec.data.locations import without_secrets
from meshrec.durable import name_full_disk
from meshrec.metrics.named import leading_text
from meshrec.planner import save_plan
from meshrec.planner.measured import compare, read_phases
from meshrec.planner.plan_report import make_report, write_html
from meshrec.runs.explained import explain_run
from meshrec.runs.fitting import load_data
from meshrec.runs.host_folder import check_storage, locked_folder
from meshrec.runs.job import RESTART_REQUESTED, RUN_VARIABLE, START_TIME_VARIABLE, Job
from meshrec.runs.lock import rank_lock
from meshrec.runs.refit import check_refit, refit, refit_summary
from meshrec.runs.report import write_report
from meshrec.runs.same_start import compare_ranks, describe_dataset, describe_start
from meshrec.runs.saved_recipe import check_data, describe_data
from meshrec.runs.source import copy_source
from meshrec.runs.warm_start import check_model, lines_of, warm_start
from meshrec.train.losses import NextItem, Ranking, Softmax
from meshrec.train.observers import (
    Event,
    Finished,
    FolderObserver,
    Observer,
    Progressed,
    Reported,
    TensorBoardObserver,
)
from meshrec.train.ranks import Ranks, choose_device, join
from meshrec.train.remarks import remarks, winner
from meshrec.train.run_folder import (
    CONFIG,
    RUNS,
    SUMMARY,
    RunFolder,
    timestamp,
    to_json,
)
from meshrec.train.stopping import StopRequest, stop_with_launcher
from meshrec.train.trackers import make_trackers
from meshrec.train.trainer import Trainer

if TYPE_CHECKING:
    from meshrec.checkpoint.stored import ObjectStore
    from meshrec.data import Dataset
    from meshrec.train.stream_trainer import StreamTrainer

# A full log becomes log_rankN.txt.1, which replaces the previous full one.
_MAX_LOG_BYTES = 1 << 24
_logger = logging.getLogger("meshrec")


def run_rank(
    job: Job, screen: Callable[[RunFolder], Observer], kind: "type[RankRun] | None" = None
) -> dict[str, Any]:
    """Train a recipe on this rank, and return the run's summary. Collective.

    Args:
        job: recipe and run options.
        screen: function creating the observer for the user's screen; called on rank 0 only.
        kind: class of the run; None: `RankRun`.

    Returns:
        ``summary.json`` content.

    Raises:
        ValueError: the run cannot start or finish as requested; raised on every rank.
    """
    # The launcher's start time, so that the run's duration includes the start of the ranks.
    began = float(os.environ.get(START_TIME_VARIABLE, time.time()))
    # The ranks join before the folder is locked, because rank 0 tells the other ranks which folder it has.
    ranks = join(choose_device(job.device))
    try:
        with locked_folder(job, ranks) as (folder, ranks_without_access), _log_to_folder(folder, ranks):
            try:
                if job.keep:
                    check_storage(job, folder, ranks_without_access, ranks)
                return (kind or RankRun)(job, ranks, folder, screen, began).run()
            except BaseException as error:
                if isinstance(error, OSError):
                    name_full_disk(error, [folder.path, tempfile.gettempdir()])
                # A rank may fail only because another rank failed first. Record the first failure.
                cause = named_failure(error) if isinstance(error, RuntimeError) else error
                _record_error(folder, ranks, cause, ranks_without_access)
                if cause is not error:
                    raise cause from error
                raise
    finally:
        if dist.is_initialized():
            leave_process_group()


def _record_error(
    folder: RunFolder, ranks: Ranks, error: BaseException, ranks_without_access: Sequence[int]
) -> None:
    """Write an error with its traceback to this rank's error file in the run folder.

    Args:
        ranks_without_access: ranks unable to see rank 0's folder.
    """
    # Otherwise MeshRec's launcher records the failure, and removes the folder if the run did not start.
    is_unlaunched = RUN_VARIABLE not in os.environ
    try:
        folder.error(ranks.rank).write_text("".join(traceback.format_exception(error)))
        if ranks.is_first and is_unlaunched:
            record_failed_run(folder, error_line(error))
        if (
            is_unlaunched
            and isinstance(error, ValueError)
            and (ranks.is_first or ranks.rank in ranks_without_access)
        ):
            from meshrec.runs.removing import remove_unstarted

            remove_unstarted(folder)
    except OSError as full:  # the disk may be what failed
        _logger.warning("%s could not be written: %s", folder.error(ranks.rank), full)


def error_line(error: BaseException) -> str:
    """Return the first line of an error message, with the type name before it unless it is a ValueError."""
    text = str(error).strip().splitlines()
    message = text[0] if text else ""
    return message if isinstance(error, ValueError) else f"{type(error).__name__}: {message}"


def record_failed_run(folder: RunFolder, error: str) -> None:
    """Set the run's state to "failed", and write a report on the training until then.

    Does nothing if the run has no configuration yet.
    """
    if (folder.path / CONFIG).exists():
        step = max((line["step"] for line in folder.metrics()), default=None)
        folder.write_state("failed", error=error, step=step)
        write_report(folder)


@contextmanager
def _log_to_folder(folder: RunFolder, ranks: Ranks) -> Iterator[None]:
    """Context manager that writes the log to this rank's log file, and holds this rank's lock.

    Rank 0 also shows warnings on the console.
    """
    handlers: list[logging.Handler] = [
        RotatingFileHandler(folder.log(ranks.rank), maxBytes=_MAX_LOG_BYTES, backupCount=1)
    ]
    handlers[0].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    if ranks.is_first and not logging.getLogger().handlers:
        handlers.append(logging.StreamHandler())
        handlers[1].setLevel(logging.WARNING)
    # Restored at the end, because the caller may be a Python program with its own logging.
    before = _logger.level, _logger.propagate
    # The file records INFO; the console handler above shows only warnings.
    _logger.setLevel(min(logging.INFO, _logger.level or logging.INFO))
    _logger.propagate = before[1] and ranks.is_first
    for handler in handlers:
        _logger.addHandler(handler)
    try:
        with rank_lock(folder, ranks.rank):
            _logger.info("rank %d of %d is process %d", ranks.rank, ranks.size, os.getpid())
            yield
    finally:
        for handler in handlers:
            _logger.removeHandler(handler)
            handler.close()
        _logger.setLevel(before[0])
        _logger.propagate = before[1]


class RankRun:
    """Training run on one rank: loads data, trains, and writes the reports.

    `meshrec.runs.following.StreamRun` overrides what differs for a stream.

    Args:
        job: recipe and run options.
        ranks: all ranks.
        folder: this rank's folder.
        screen: function creating the observer for the user's screen; called on rank 0 only.
        began: start time of the user's command, in seconds since 1970.
    """

    def __init__(
        self, job: Job, ranks: Ranks, folder: RunFolder, screen: Callable[[RunFolder], Observer], began: float
    ) -> None:
        self._job, self._ranks, self._folder = job, ranks, folder
        # Empty on ranks other than 0, unless the job has an observer for every rank.
        self._observers: list[Observer] = []
        if ranks.is_first:
            self._observers = [
                FolderObserver(folder),
                # Event files only grow, and a stream has no end: `metrics.jsonl` and the page show it.
                *([] if job.stream is not None else [TensorBoardObserver(folder.path)]),
                *make_trackers(job.track, folder),
                screen(folder),
            ]
        if job.on_event is not None:
            self._observers.append(job.on_event)
        # Start time of this process, as a string, and of the command, in seconds since 1970.
        self._began, self._start = timestamp(), began
        # Object store for this run's checkpoints; None: they are in the run folder.
        self._store: ObjectStore | None = None
        if job.store is not None:
            from meshrec.checkpoint import stored

            self._store = stored.ObjectStore(job.store).under(ranks.broadcast(folder.path.name))
        # Differences from the run whose weights this run started from; see `warm_start`.
        self._warm_start: dict[str, Any] | None = None

    def run(self) -> dict[str, Any]:
        """Load the data, train, evaluate, write the reports, and return the summary. Collective."""
        stop = StopRequest()
        with stop.listening():
            # Ranks started by MeshRec's launcher must not outlive it.
            if RUN_VARIABLE in os.environ:
                stop_with_launcher()
            # An error file from an earlier start would look like a failure of this start.
            self._folder.discard(self._folder.error(self._ranks.rank))
            self._compare_starts()
            # Fail now, and not after the first fit.
            check_refit(self._job)
            if self._job.warm_start is not None:
                check_model(self._job.recipe, self._job.warm_start)
            seed = self._job.recipe.training.seed
            torch.manual_seed(seed)  # a source of data that draws numbers draws the same ones on every rank
            seed_python_and_numpy(seed, "data")
            trainer = self._make_trainer(stop)
            self._resume(trainer)
            self._write_inputs(trainer)
            # Loading and planning may take any time; only from here on do ranks expect answers within the
            # timeout.
            self._ranks.wait_for_all()
            self._ranks.expect_answers_within(self._job.rank_timeout)
            # Training seconds of earlier starts, from the checkpoint.
            trained = trainer.progress.seconds
            trainer.run()
            skipped = self._merge_skipped(self._ranks.collect(dict(trainer.dataset.skipped)))
            summary = self._summary(trainer, trainer.progress.seconds - trained, skipped)
            self._extend(trainer, summary, stop)
            if self._ranks.is_first:
                self._write_results(trainer, summary, stop)
            self._ranks.wait_for_all()
        # A host that received a signal leaves the run. On the other hosts, the launcher restarts the ranks.
        if trainer.stopped and stop.signal is None and restarts_without_host():
            # The command turns this entry into an exit code by which the launcher restarts the ranks.
            return {**summary, RESTART_REQUESTED: True}
        return summary

    def _make_trainer(self, stop: StopRequest) -> "Trainer | StreamTrainer":
        """Load the data, and create the trainer. Collective."""
        return Trainer(
            self._job.recipe,
            self._load(),
            self._ranks,
            folder=self._folder,
            observer=self._notify,
            stop=stop,
            profile=self._job.profile,
            keep=self._job.keep,
            store=self._store,
        )

    def _extend(self, trainer: Any, summary: dict[str, Any], stop: StopRequest) -> None:
        """Explain and refit the finished run, and add the results to the summary. Collective."""
        # After training, when the model has the reported weights.
        summary["explained"] = explain_run(trainer, self._folder)
        if self._job.final is not None and summary["state"] == "finished":
            self._refit(trainer, summary, stop)

    def _refit(self, trainer: Trainer, summary: dict[str, Any], stop: StopRequest) -> None:
        """Refit on training, validation and test rows, and add the result to the summary. Collective."""
        self._notify(Reported("fitting again on all rows, validation and test rows too"))

        def tell(share: float) -> None:
            """Report the finished share of the refit, from 0 to 1, to all observers."""
            self._notify(Progressed("the fit on all rows", share))

        result = refit(self._job, trainer, self._folder, self._ranks, stop=stop, tell=tell)
        # A resumed run continues the refit where it was stopped.
        if result.is_stopped:
            summary["state"] = "stopped"
        else:
            summary["final"] = refit_summary(result, self._folder, summary)
            self._notify(Reported(summary["final"]["text"]))

    def _compare_starts(self) -> None:
        """Check that all ranks were started with the same recipe, options, data and versions. Collective."""
        job = self._job
        # The name is not compared: rank 0 alone chooses the folder.
        names = (
            "resume",
            "changes",
            "profile",
            "baselines",
            "track",
            "rank_timeout",
            "keep",
            "store",
            "final",
            "warm_start",
            "stream",
            "actions",
            "stream_options",
            "label_options",
            "after_roll_back",
        )
        options: dict[str, Any] = {name: to_json(getattr(job, name)) for name in names}
        options["device"] = self._ranks.device.type
        # A followed run reads no data files, except for rank 0, which fits the features.
        start = describe_start(job.recipe, job.source, options, files=job.stream is None)
        compare_ranks(self._ranks, start, "were not started alike")

    def _load(self) -> "Dataset":
        """Load the data, and check that all ranks have loaded the same data. Collective.

        Raises:
            Exception: a rank cannot load the data, or has other data; raised on every rank.
        """

        def tell(share: float) -> None:
            """Report the finished share of fitting, from 0 to 1, to all observers."""
            self._notify(Progressed("fitting features", share))

        # An error on one rank is raised on all ranks. Otherwise they would wait for it in the comparison.
        with together(self._ranks.axis, "loading the data"):
            dataset = load_data(self._job.recipe.data, self._folder, self._ranks, tell, self._job.warm_start)
        compare_ranks(self._ranks, describe_dataset(dataset), "have loaded different data")
        return dataset

    def _resume(self, trainer: "Trainer | StreamTrainer") -> None:
        """Load the newest checkpoint if there is one. Collective.

        There is one after --resume, and after the launcher has restarted the ranks.

        Raises:
            ValueError: the data differs from the run's, or --resume was given but no checkpoint exists.
        """
        config = self._folder.read_json(CONFIG)
        if config is not None:
            check_data(config, trainer.dataset, self._folder.path)
        if not trainer.resume():
            if self._job.resume:
                raise ValueError(
                    f"{self._folder.path} has no checkpoint to resume from; start a new run with another "
                    "--name."
                )
            if self._ranks.is_first:  # an earlier start may have ended before the first checkpoint
                self._folder.remove_lines_after(0, evaluated=False)
            if self._job.warm_start is not None:
                self._warm_start = warm_start(self._job, trainer, self._folder, self._ranks)
                for line in lines_of(self._warm_start):
                    self._notify(Reported(line))
        if self._job.resume:
            self._notify(Reported(f"resuming {self._folder.path} from step {trainer.progress.step:,}"))
            for name, old, new in self._job.changes:
                self._notify(Reported(f"{name} {old} -> {new}"))

    def _notify(self, event: Event) -> None:
        """Pass an event to all observers on this rank."""
        for observer in self._observers:
            observer(event)

    def _write_inputs(self, trainer: "Trainer | StreamTrainer") -> None:
        """Write ``config.json``, the run state, the plan and its HTML page, on rank 0. Collective."""
        # Collective, so before the other ranks return.
        hosts = Counter(self._ranks.collect(socket.gethostname()))
        if not self._ranks.is_first:
            return
        before = self._folder.read_json(CONFIG) or {}
        start = {
            "began": self._began,
            "from_step": trainer.progress.step,
            "ranks": self._ranks.size,
            "hosts": dict(hosts),
            "changes": [list(change) for change in self._job.changes],
        }
        config = {
            "recipe": to_json(self._job.recipe),
            "source": self._job.source,
            "code": copy_source(self._folder, self._job.source, before.get("code")),
            "data": describe_data(trainer.dataset),
            "ranks": self._ranks.size,
            "device": self._ranks.device.type,
            "baselines": self._job.baselines,
            "final": self._job.final,
            "warm_start": self._warm_start or before.get("warm_start"),
            "stream": None if self._job.stream is None else without_secrets(self._job.stream),
            "actions": None if self._job.actions is None else without_secrets(self._job.actions),
            "stream_options": to_json(self._job.stream_options),
            "label_options": to_json(self._job.label_options),
            "began": before.get("began", self._began),
            "torch": torch.__version__,
            "starts": [*before.get("starts", []), start],
            "commands": next_commands(self._folder, is_stream=self._job.stream is not None),
        }
        self._folder.write_json(CONFIG, config, seal=True)
        self._folder.write_state("running", step=trainer.progress.step)
        # None if the model is unsharded.
        plan = trainer.built.plan
        if plan is not None:
            save_plan(plan, self._folder.plan)
            write_html(make_report(plan), self._folder.plan_page)

    def _merge_skipped(self, by_rank: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
        """Merge the counts of skipped rows from all ranks.

        Ranks that read the same file report the same counts, so counts are not added.

        Args:
            by_rank: per rank, counts by file and reason: ``{"day_0.parquet": {"negative label": 3}}``.
        """
        merged: dict[str, dict[str, int]] = {}
        for of_rank in by_rank:
            for file, reasons in of_rank.items():
                merged.setdefault(file, {}).update(reasons)
        return merged

    def _summary(
        self,
        trainer: "Trainer | StreamTrainer",
        train_seconds: float,
        skipped: Mapping[str, Mapping[str, int]],
    ) -> dict[str, Any]:
        """Return the summary of the training. `_extend` and `_write_results` add further entries later.

        Args:
            train_seconds: training time in seconds since this start, without earlier starts.
        """
        progress, results = trainer.progress, self._results(trainer)
        error = None
        if not trainer.saver.is_saved:
            # Without the last checkpoint, the run counts as failed, although training is complete.
            error = f"the last checkpoint could not be saved: {trainer.saver.failures[-1]}"
        return {
            "state": "failed" if error else "stopped" if trainer.stopped else "finished",
            "error": error,
            "recipe": self._job.recipe.name,
            "ranks": self._ranks.size,
            "step": progress.step,
            "num_steps": trainer.num_steps,
            "samples": progress.num_samples,
            "skipped": skipped,
            "train_seconds": train_seconds,
            "train_seconds_of_all_starts": progress.seconds,
            "seconds": time.time() - self._start,
            "samples_per_second": progress.num_samples / progress.seconds if progress.seconds else 0.0,
            "ended_because": trainer.ended_because,
            **results,
            "baselines": {},
            "baselines_test": {},
            "baseline_curves": {},
            "checkpoints": self._checkpoints(results["weights_step"]),
            "failed_saves": trainer.saver.failures,
            "phases": self._phases(trainer),
            "warm_start": (self._folder.read_json(CONFIG) or {}).get("warm_start"),
            "began": self._began,
            "ended": timestamp(),
        }

    def _results(self, trainer: Any) -> dict[str, Any]:
        """Return the results of evaluations for the summary."""
        return {
            "best_step": trainer.evaluator.early.best_step,
            "weights_step": trainer.evaluator.weights_step,
            "validation": trainer.validation,
            "test": trainer.test,
            "evaluated_users": self._evaluated_users(trainer.dataset),
            "curves": trainer.evaluator.curves,
            "dense_precision": self._precision(trainer),
            "best_possible_auc": trainer.dataset.best_auc,
            "held_back": self._held_back(trainer.dataset),
        }

    def _precision(self, trainer: Trainer) -> dict[str, Any]:
        """Return the precision used for the dense part, "bf16" or "fp32", in the entry ``used``.

        If the losses of the reported weights in bf16 and in fp32 were compared, further entries have the
        result; see `LossCheck`.
        """
        check = trainer.loss_check
        if check is None:
            return {"used": "bf16" if trainer.precision.bf16 else "fp32"}
        return {"used": "bf16", **check._asdict(), "difference": check.difference}

    def _evaluated_users(self, dataset: "Dataset") -> dict[str, tuple[int, int]]:
        """Return the pair (evaluated users, held-out users) by data part, ``validation`` and ``test``.

        A part is missing unless only a sample of its held-out users is evaluated.
        """
        parts = {"validation": dataset.validation, "test": dataset.test}
        return {
            name: (part.num_samples, dataset.num_held_out[name])
            for name, part in parts.items()
            if part is not None and name in dataset.num_held_out
        }

    def _held_back(self, dataset: "Dataset") -> int:
        """Return how many more samples a refit on all rows would have; 0 if a refit is not possible."""
        try:
            # Raises for sources without a form that has all rows.
            self._job.recipe.data.all_rows()
        except ValueError:
            return 0
        parts = {"validation": dataset.validation, "test": dataset.test}
        # Where a sample is evaluated, the others are held back too.
        sizes = {name: part.num_samples for name, part in parts.items() if part is not None}
        return sum((sizes | dict(dataset.num_held_out)).values())

    def _checkpoints(self, weights_step: int) -> dict[str, str | None]:
        """Return the paths of the checkpoint with the reported weights ("weights") and of the last ("last").

        A path is None if the checkpoint does not exist.
        """
        paths: dict[str, str | None] = {}
        for name, selection in (("weights", {"step": weights_step}), ("last", {"last": True})):
            try:
                paths[name] = str(find_checkpoint(self._folder.path, **selection))
            except ValueError:
                paths[name] = None
        return paths

    def _phases(self, trainer: "Trainer | StreamTrainer") -> list[dict[str, Any]]:
        """Return a dict per measured phase, and at the end a dict for the whole step.

        A dict has the name (``phase``), and the ``predicted`` and ``measured`` seconds; see
        `meshrec.planner.measured.Comparison`. The list is empty for an unsharded model, or if no phases were
        measured.
        """
        plan = trainer.built.plan
        times = read_phases(self._folder.path) if self._folder.phases.is_file() else []
        return [] if plan is None or not times else [row._asdict() for row in compare(plan, times)]

    def _write_results(
        self, trainer: "Trainer | StreamTrainer", summary: dict[str, Any], stop: StopRequest
    ) -> None:
        """Compute the baselines, and write summary, state and report. Rank 0 only."""
        num_evaluations = sum(line["kind"] == "validation" for line in self._folder.metrics())
        if self._store is not None:
            self._download_weights(summary["weights_step"], summary)
        summary["remarks"] = remarks(summary, self._job.recipe.training, num_evaluations)
        # Write the summary now, in case the baselines fail or the process is killed.
        self._folder.write_json(SUMMARY, summary)
        dataset = trainer.dataset
        evaluated = dataset.validation is not None or dataset.test is not None
        if self._job.baselines and evaluated and not trainer.stopped:
            self._evaluate_baselines(trainer, summary, stop)
            summary["winner"] = winner(summary)
        summary["seconds"], summary["ended"] = time.time() - self._start, timestamp()
        self._folder.write_json(SUMMARY, summary)
        self._folder.write_state(summary["state"], error=summary["error"], step=summary["step"])
        write_report(self._folder)
        self._notify(Finished(summary))

    def _download_weights(self, step: int, summary: dict[str, Any]) -> None:
        """Download the reported weights from the object store to the run folder, where commands find them."""
        from meshrec.checkpoint.stored import StoredCheckpoints

        assert self._store is not None
        for name in (BEST, CHECKPOINTS):
            # The best weights first; without validation data, the last checkpoint has them.
            checkpoints = StoredCheckpoints(self._store.under(name), self._folder.path)
            if checkpoints.steps().get(step):
                checkpoints.download(step, self._folder.path / name)
                break
        summary["checkpoints"] = self._checkpoints(step)

    def _evaluate_baselines(
        self, trainer: "Trainer | StreamTrainer", summary: dict[str, Any], stop: StopRequest
    ) -> None:
        """Add the baselines' metrics to the summary. After a stop request, skip the remaining baselines."""

        def tell(share: float) -> None:
            """Report the finished share, from 0 to 1, or raise `_Stopped` after a stop request."""
            if stop.signal is not None:
                # Leaves the computation of a baseline, which calls `tell` often.
                raise _Stopped
            self._notify(Progressed("baselines", share))

        try:
            loss = self._job.recipe.loss
            if isinstance(loss, Softmax | Ranking):
                self._notify(Reported("there are no baselines for labels of classes or of queries"))
                return
            if isinstance(loss, NextItem):
                from meshrec.train.ranking_baselines import ranking_baselines

                results = ranking_baselines(trainer.dataset, tell, loss=loss)
            else:
                from meshrec.train.baselines import baselines

                results = baselines(trainer.dataset, tell)
            for name, quality, curves in results:
                for data, key in (("validation", "baselines"), ("test", "baselines_test")):
                    if data in quality:
                        summary[key][name] = quality[data]
                if curves:
                    summary["baseline_curves"][name] = curves.get("test") or curves["validation"]
                # Some baselines take minutes, and a screen without a terminal has no progress bar.
                evaluated = quality.get("test") or quality.get("validation") or {}
                self._notify(Reported(f"baseline {name}: {leading_text(evaluated)}"))
        except _Stopped:
            self._notify(Reported("the baselines were skipped, as you asked; the run itself is complete"))


def restarts_without_host() -> bool:
    """Return whether an elastic launcher (torchrun) on several hosts would restart the ranks if they failed.

    In this case, after a signal to a host, the ranks on that host end with exit code 0. All other ranks fail
    on purpose, so that the launcher restarts them with fewer hosts.
    """
    # Number of hosts, allowed restarts, and restarts so far.
    values = [
        int(os.environ.get(f"{name}", "0"))
        for name in ("GROUP_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT")
    ]
    return values[0] > 1 and values[2] < values[1]


class _Stopped(Exception):
    """Raised to leave the computation of baselines, when the user has asked the run to stop."""


def next_commands(folder: RunFolder, *, is_stream: bool | None = None) -> dict[str, str]:
    """Return command lines a user may type next for a run, by purpose, such as "resume" or "export".

    Args:
        folder: run folder.
        is_stream: whether the run follows a stream; None: as the run's configuration says.
    """
    if is_stream is None:
        is_stream = (folder.read_json(CONFIG) or {}).get("stream") is not None
    command = "follow" if is_stream else "train"
    runs = "" if folder.path.parent == RUNS else f" --runs {quote(str(folder.path.parent))}"
    name, path = folder.path.name, quote(str(folder.path))
    return {
        "resume": f"meshrec {command} --resume --name {quote(name)}{runs}",
        "final": f"meshrec train --resume --name {quote(name)}{runs} --final all",
        "export": f"meshrec checkpoint export {path} {quote(f'{name}.safetensors')}",
        "evaluate": f"meshrec evaluate {path} --data FILES",
        "predict": f"meshrec predict {path} --data FILES --out scores.parquet",
        "recommend": f"meshrec recommend {path} --users FILE -k 20 --out recs.parquet",
        "package": f"meshrec export {path} --out {quote(f'{name}-package')}",
        "serve": f"meshrec serve {quote(f'{name}-package')}",
        "load": f'meshrec.checkpoint.load({json.dumps(str(folder.path))}, {{"model": model}})',
    }
