"""Training: recipes, the trainer, and the folder a run leaves behind."""

from meshrec.train.architectures import DeepFMConfig, DLRMConfig, DLRMDCNConfig, tables_on_meta
from meshrec.train.ranks import Ranks, join
from meshrec.train.recipe import DataSource, DenseOptimizer, ModelConfig, Placement, Recipe, Training
from meshrec.train.recipes import RECIPES, resolve
from meshrec.train.run_folder import RunFolder
from meshrec.train.schedule import Schedule
from meshrec.train.sources import MovieLens, SyntheticClicks
from meshrec.train.trainer import Trainer

__all__ = [
    "RECIPES",
    "DLRMConfig",
    "DLRMDCNConfig",
    "DataSource",
    "DeepFMConfig",
    "DenseOptimizer",
    "ModelConfig",
    "MovieLens",
    "Placement",
    "Ranks",
    "Recipe",
    "RunFolder",
    "Schedule",
    "SyntheticClicks",
    "Trainer",
    "Training",
    "join",
    "resolve",
    "tables_on_meta",
]
