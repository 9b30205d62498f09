"""Plan-independent checkpoints: saved under one sharding plan, loaded under any plan and world size."""

from typing import TYPE_CHECKING

from meshrec.checkpoint.agreement import CheckpointError, DamagedCheckpointError
from meshrec.checkpoint.delta_files import DeltaError, Published, verify_deltas
from meshrec.checkpoint.finding import Hold, find_checkpoint, read_hold
from meshrec.checkpoint.manifest import Manifest
from meshrec.checkpoint.reading import read_manifest, verify_data
from meshrec.checkpoint.tables import export_safetensors, import_weights
from meshrec.lazy import import_on_use

if TYPE_CHECKING:
    from meshrec.checkpoint.delta import RowTracker
    from meshrec.checkpoint.manager import CheckpointManager
    from meshrec.checkpoint.publishing import DeltaPublisher
    from meshrec.checkpoint.row_files import export_rows, import_rows
    from meshrec.checkpoint.saving import PendingSave, async_save, load, save

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "DamagedCheckpointError",
    "DeltaError",
    "DeltaPublisher",
    "Hold",
    "Manifest",
    "PendingSave",
    "Published",
    "RowTracker",
    "async_save",
    "export_rows",
    "export_safetensors",
    "find_checkpoint",
    "import_rows",
    "import_weights",
    "load",
    "read_hold",
    "read_manifest",
    "save",
    "verify_data",
    "verify_deltas",
]

# Lazy: these modules import sharded tables and torch.distributed.checkpoint, which a server never uses.
import_on_use(__name__)
