"""Training: recipes, the trainer, and the folder of a run."""

from meshrec.train.architectures import (
    ClickTowersConfig,
    DeepFMConfig,
    DINConfig,
    DLRMConfig,
    DLRMDCNConfig,
    HSTUConfig,
    MultiTaskConfig,
    SASRecConfig,
    TwoTowerConfig,
    WideDeepConfig,
    tables_on_meta,
)
from meshrec.train.class_loss import Softmax
from meshrec.train.evaluation import Scored, evaluate, score
from meshrec.train.losses import BinaryCrossEntropy, Huber, Loss, NextItem, SquaredError, Task, Tasks
from meshrec.train.query_loss import Ranking
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
from meshrec.train.schedule import Schedule
from meshrec.train.sources import Criteo, Csv, Frame, MovieLens, MovieLensSequences, Parquet, SyntheticClicks
from meshrec.train.trainer import Trainer
from meshrec.train.watch import LossError

__all__ = [
    "RECIPES",
    "BinaryCrossEntropy",
    "ClickTowersConfig",
    "Criteo",
    "Csv",
    "DINConfig",
    "DLRMConfig",
    "DLRMDCNConfig",
    "DataSource",
    "DeepFMConfig",
    "DenseOptimizer",
    "FittedSource",
    "Frame",
    "HSTUConfig",
    "Huber",
    "Loss",
    "LossError",
    "ModelConfig",
    "MovieLens",
    "MovieLensSequences",
    "MultiTaskConfig",
    "NextItem",
    "Parquet",
    "Placement",
    "Ranking",
    "Ranks",
    "Recipe",
    "RunFolder",
    "RunState",
    "SASRecConfig",
    "Schedule",
    "Scored",
    "Softmax",
    "SquaredError",
    "SyntheticClicks",
    "Task",
    "Tasks",
    "Trainer",
    "Training",
    "TwoTowerConfig",
    "WideDeepConfig",
    "evaluate",
    "find_run",
    "join",
    "resolve",
    "score",
    "tables_on_meta",
]
