"""Checkpoints that are independent of the plan: saved under one plan, loaded under any other, on any
ranks.
"""

from meshrec.checkpoint.agreement import CheckpointError, DamagedCheckpointError
from meshrec.checkpoint.delta import RowTracker
from meshrec.checkpoint.finding import find_checkpoint
from meshrec.checkpoint.manager import CheckpointManager
from meshrec.checkpoint.manifest import Manifest
from meshrec.checkpoint.publishing import DeltaError, DeltaPublisher, Published, verify_deltas
from meshrec.checkpoint.row_files import export_rows, import_rows
from meshrec.checkpoint.saving import PendingSave, async_save, load, save
from meshrec.checkpoint.storage import read_manifest, verify_data
from meshrec.checkpoint.tables import export_safetensors, import_weights

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "DamagedCheckpointError",
    "DeltaError",
    "DeltaPublisher",
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
    "read_manifest",
    "save",
    "verify_data",
    "verify_deltas",
]
