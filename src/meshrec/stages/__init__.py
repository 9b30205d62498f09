"""Pipeline parallelism: model stages work on different splits (microbatches) at once."""

from meshrec.stages.choosing import StageChoice
from meshrec.stages.links import DeviceLink, StageLink
from meshrec.stages.ranks import StagedOverRanks, StepResult
from meshrec.stages.report import write_report
from meshrec.stages.running import StageError, split_seed
from meshrec.stages.staged import Staged
from meshrec.stages.timeline import Event, Timeline

__all__ = [
    "DeviceLink",
    "Event",
    "StageChoice",
    "StageError",
    "StageLink",
    "Staged",
    "StagedOverRanks",
    "StepResult",
    "Timeline",
    "split_seed",
    "write_report",
]
