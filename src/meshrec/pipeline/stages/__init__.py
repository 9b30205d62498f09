"""Model parallelism in stages: a model cut into parts that work on different splits of the batch."""

from meshrec.pipeline.stages.choosing import StageChoice
from meshrec.pipeline.stages.links import DeviceLink, StageLink
from meshrec.pipeline.stages.ranks import StagedOverRanks, StepResult
from meshrec.pipeline.stages.report import write_report
from meshrec.pipeline.stages.running import StageError, split_seed
from meshrec.pipeline.stages.staged import Staged
from meshrec.pipeline.stages.timeline import Event, Timeline

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
