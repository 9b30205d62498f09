"""Work with runs: train on ranks, restore recipes, score and evaluate data, export, and quantize.

A run is one training of a recipe. Its folder, such as ``runs/dlrm-1``, contains configuration, checkpoints,
metrics and logs (see ``train/run_folder.py``).

``runs.export`` and ``runs.quantize`` are not imported here, because they import the compiler, which training
does not need.
"""

from meshrec.runs.fitting import data_of_run, features_of
from meshrec.runs.lock import claim_run
from meshrec.runs.saved_recipe import load_recipe

__all__ = ["claim_run", "data_of_run", "features_of", "load_recipe"]
