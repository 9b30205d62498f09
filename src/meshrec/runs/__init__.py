"""What is done with a run: train it on ranks, read its recipe back, score and judge data, export, quantise.

``runs.export`` and ``runs.quantize`` are not imported here: they bring the compiler, which training needs
nothing of.
"""

from meshrec.runs.fitting import data_of_run, features_of
from meshrec.runs.lock import claim_run
from meshrec.runs.saved_recipe import load_recipe

__all__ = ["claim_run", "data_of_run", "features_of", "load_recipe"]
