"""Pipeline parallelism: model stages work on different splits (microbatches) at the same time.

[Note: units, stages, splits and lanes]

- A **unit** is a group of nodes in the traced model graph that always run together, such as a submodule and
  the activation after it. Units are numbered in an executable order. See ``tracing.py``.
- A **stage** is a set of units that runs in one thread, on one device, or on one rank. Stages are numbered;
  a stage never reads a value from a later stage. A **cut** assigns every unit to a stage.
- A **split** is a part of the batch's samples, called a microbatch elsewhere. Split ``k`` passes through the
  stages one after another, while the stages work on other splits.
- A **value** is the result of a graph node, identified by the node's name. It may be a tensor or a nested
  container; its **leaves** are the entries that ``torch.utils._pytree.tree_leaves`` returns.
- Table lookups run once per batch, before the first split ("whole"); all other units run once per split.
- A **lane** is a full copy of all stages, used only when stages are on different ranks. Every lane gets
  another batch, and lanes average their gradients, as in data parallelism.
"""

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
