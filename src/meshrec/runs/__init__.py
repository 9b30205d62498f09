"""Work with runs: train on ranks, restore recipes, score and evaluate data, export, and quantize.

A run is one training of a recipe. Its folder, such as ``runs/dlrm-1``, contains configuration, checkpoints,
metrics and logs (see ``train/run_folder.py``).
"""

from typing import TYPE_CHECKING

from meshrec.lazy import import_on_use

if TYPE_CHECKING:
    from meshrec.runs.fitting import data_of_run, features_of
    from meshrec.runs.lock import claim_run
    from meshrec.runs.saved_recipe import load_recipe

__all__ = ["claim_run", "data_of_run", "features_of", "load_recipe"]

import_on_use(__name__)
