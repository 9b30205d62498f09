"""What every rank of a run does, from joining the others to the last page."""

import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshrec.comms.leaving import leave_process_group
from meshrec.planner import save_plan
from meshrec.reports.plan_html import write_html
from meshrec.reports.plan_report import make_report
from meshrec.train.baselines import baselines
from meshrec.train.observers import Event, Finished, FolderObserver, Observer, Said, TensorBoardObserver
from meshrec.train.ranks import Ranks, choose_device, join
from meshrec.train.recipe import Recipe
from meshrec.train.report import write_report
from meshrec.train.run_folder import CONFIG, RUNS, SUMMARY, RunFolder, all_runs, new_run, now, to_json
from meshrec.train.stopping import StopRequest, stop_with_parent
from meshrec.train.trainer import Trainer

LAUNCH = "launch.json"
"""Holds the id of the launch that made the run's folder."""
RUN_VARIABLE = "MESHREC_RUN"
"""Names the run's folder to the ranks that our launcher starts, which has made it."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to do.

    Attributes:
        recipe: what to train.
        name: of the run's folder (default: the recipe's with a number).
        runs: where run folders are.
        device: ``cpu`` or ``cuda`` (default: what there is).
        resume: go on with the run of that name, from its last checkpoint.
        profile: trace a few steps.
        baselines: judge the three baselines, too.
    """

    recipe: Recipe
    name: str | None = None
    runs: Path = RUNS
    device: str | None = None
    resume: bool = False
    profile: bool = False
    baselines: bool = True


def work(job: Job, screen: Callable[[RunFolder], Observer]) -> dict[str, Any]:
    """Trains as one rank; returns the summary.

    Args:
        screen: makes what shows the run to its user; on rank 0 only.

    Raises:
        ValueError: on every rank, for what cannot be done.
    """
    ranks = join(choose_device(job.device))
    try:
        folder = RunFolder(Path(ranks.share(_folder(job) if ranks.is_first else None)))
        try:
            return _Run(job, ranks, folder, screen).do()
        except BaseException:
            folder.error(ranks.rank).write_text(traceback.format_exc())
            raise
    finally:
        if dist.is_initialized():
            leave_process_group()


def _folder(job: Job) -> str:
    """The run's folder: what our launcher made, or what this launch made before it started its ranks anew."""
    made = os.environ.get(RUN_VARIABLE)
    if made:
        return made
    launch = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if launch != "none":
        for known in all_runs(job.runs):
            if known.read_json(LAUNCH) == launch:
                return str(known.path)
    folder = new_run(job.name, job.recipe.name, job.runs, resume=job.resume)
    if launch != "none":
        folder.write_json(LAUNCH, launch)
    return str(folder.path)


class _Run:
    """One run on one rank."""

    def __init__(
        self, job: Job, ranks: Ranks, folder: RunFolder, screen: Callable[[RunFolder], Observer]
    ) -> None:
        self._job, self._ranks, self._folder = job, ranks, folder
        self._observers: list[Observer] = []
        if ranks.is_first:
            self._observers = [FolderObserver(folder), TensorBoardObserver(folder.path), screen(folder)]
        self._began = now()

    def do(self) -> dict[str, Any]:
        """Everything."""
        stop = StopRequest()
        with stop.listening():
            if RUN_VARIABLE in os.environ:
                stop_with_parent()
            dataset = self._job.recipe.data.load()
            trainer = Trainer(
                self._job.recipe,
                dataset,
                self._ranks,
                folder=self._folder,
                observer=self._tell,
                stop=stop,
                profile=self._job.profile,
            )
            self._resume(trainer)
            self._write_inputs(trainer)
            start = time.perf_counter()
            trainer.run()
            summary = self._summary(trainer, time.perf_counter() - start)
            if self._ranks.is_first:
                self._conclude(trainer, summary)
            self._ranks.wait_for_all()
        return summary

    def _resume(self, trainer: Trainer) -> None:
        """A new run's folder has no checkpoint; ranks that were started anew find those of before."""
        if not trainer.resume() and self._job.resume:
            raise ValueError(
                f"{self._folder.path} holds no checkpoint to resume from; train anew under another --name."
            )

    def _tell(self, event: Event) -> None:
        for observer in self._observers:
            observer(event)

    def _write_inputs(self, trainer: Trainer) -> None:
        if not self._ranks.is_first:
            return
        config = {
            "recipe": to_json(self._job.recipe),
            "ranks": self._ranks.size,
            "device": self._ranks.device.type,
            "began": self._began,
            "torch": torch.__version__,
        }
        self._folder.write_json(CONFIG, config)
        plan = trainer.built.plan
        if plan is not None:
            save_plan(plan, self._folder.plan)
            write_html(make_report(plan), self._folder.plan_page)

    def _summary(self, trainer: Trainer, seconds: float) -> dict[str, Any]:
        progress = trainer.progress
        return {
            "state": "stopped" if trainer.stopped else "finished",
            "recipe": self._job.recipe.name,
            "ranks": self._ranks.size,
            "step": progress.step,
            "num_steps": trainer.num_steps,
            "samples": progress.num_samples,
            "train_seconds": progress.seconds,
            "seconds": seconds,
            "samples_per_second": progress.num_samples / progress.seconds if progress.seconds else 0.0,
            "best_step": trainer.early.best_step,
            "validation": trainer.validation,
            "baselines": {},
            "best_possible_auc": trainer.dataset.best_auc,
            "began": self._began,
            "ended": now(),
        }

    def _conclude(self, trainer: Trainer, summary: dict[str, Any]) -> None:
        """The baselines and the pages: rank 0's work."""
        self._folder.write_json(SUMMARY, summary)
        wanted = self._job.baselines and not trainer.stopped and trainer.dataset.validation is not None
        if wanted:
            self._tell(Said("judging the baselines"))
            for baseline in baselines(trainer.dataset):
                summary["baselines"][baseline.name] = baseline.quality
            self._folder.write_json(SUMMARY, summary)
        write_report(self._folder)
        self._tell(Finished(summary))
