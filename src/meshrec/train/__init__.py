"""Training: recipes, the trainer, and the folder a run leaves behind."""

from meshrec.train.architectures import (
    DeepFMConfig,
    DLRMConfig,
    DLRMDCNConfig,
    MultiTaskConfig,
    tables_on_meta,
)
from meshrec.train.evaluation import Scored, evaluate, score
from meshrec.train.losses import BinaryCrossEntropy, Huber, Loss, SquaredError, Task, Tasks
from meshrec.train.ranks import Ranks, join
from meshrec.train.recipe import (
    DataSource,
    DenseOptimizer,
    FittedSource,
    ModelConfig,
    Placement,
    Recipe,
    Training,
)
from meshrec.train.recipes import RECIPES, resolve
from meshrec.train.run_folder import RunFolder, RunState, find_run
from meshrec.train.saved_recipe import load_recipe
from meshrec.train.schedule import Schedule
from meshrec.train.sources import Criteo, Csv, Frame, MovieLens, Parquet, SyntheticClicks
from meshrec.train.trainer import Trainer
from meshrec.train.watch import LossError

__all__ = [
    "RECIPES",
    "BinaryCrossEntropy",
    "Criteo",
    "Csv",
    "DLRMConfig",
    "DLRMDCNConfig",
    "DataSource",
    "DeepFMConfig",
    "DenseOptimizer",
    "FittedSource",
    "Frame",
    "Huber",
    "Loss",
    "LossError",
    "ModelConfig",
    "MovieLens",
    "MultiTaskConfig",
    "Parquet",
    "Placement",
    "Ranks",
    "Recipe",
    "RunFolder",
    "RunState",
    "Schedule",
    "Scored",
    "SquaredError",
    "SyntheticClicks",
    "Task",
    "Tasks",
    "Trainer",
    "Training",
    "evaluate",
    "find_run",
    "join",
    "load_recipe",
    "resolve",
    "score",
    "tables_on_meta",
]
