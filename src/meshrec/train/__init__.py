"""Train models: recipes (which define a run), the trainer, and run folders."""

from typing import TYPE_CHECKING

from meshrec.lazy import import_on_use

if TYPE_CHECKING:
    from meshrec.train.architectures import (
        ClickTowersConfig,
        DeepFMConfig,
        DINConfig,
        DLRMConfig,
        DLRMDCNConfig,
        MultiTaskConfig,
        TwoTowerConfig,
        tables_on_meta,
    )
    from meshrec.train.click_logs import ClickLog
    from meshrec.train.evaluation import Scored, evaluate, score
    from meshrec.train.hstu_ranking import HSTURankerConfig, SyntheticImpressions
    from meshrec.train.log_sources import BooksRatings, Log, LogSource, MovieLensSequences
    from meshrec.train.losses import (
        BinaryCrossEntropy,
        Huber,
        Loss,
        NextItem,
        Ranking,
        Softmax,
        SquaredError,
        Task,
        Tasks,
    )
    from meshrec.train.next_item_configs import BERT4RecConfig, GRU4RecConfig, HSTUConfig, SASRecConfig
    from meshrec.train.ranks import Ranks, join
    from meshrec.train.recipe import (
        DataSource,
        DenseOptimizer,
        FittedSource,
        ModelConfig,
        Placement,
        RankFittedSource,
        Recipe,
        SplitOptions,
        TableSource,
        Training,
    )
    from meshrec.train.recipe_files import resolve
    from meshrec.train.recipes import RECIPES
    from meshrec.train.run_folder import RunFolder, RunState, find_run
    from meshrec.train.schedule import Schedule
    from meshrec.train.sources import Criteo, Csv, Frame, MovieLens, Parquet, SyntheticClicks
    from meshrec.train.stream_options import StreamOptions
    from meshrec.train.stream_trainer import StreamTrainer
    from meshrec.train.trainer import Trainer
    from meshrec.train.watch import LossError
    from meshrec.train.wide_deep import WideDeepConfig

__all__ = [
    "RECIPES",
    "BERT4RecConfig",
    "BinaryCrossEntropy",
    "BooksRatings",
    "ClickLog",
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
    "GRU4RecConfig",
    "HSTUConfig",
    "HSTURankerConfig",
    "Huber",
    "Log",
    "LogSource",
    "Loss",
    "LossError",
    "ModelConfig",
    "MovieLens",
    "MovieLensSequences",
    "MultiTaskConfig",
    "NextItem",
    "Parquet",
    "Placement",
    "RankFittedSource",
    "Ranking",
    "Ranks",
    "Recipe",
    "RunFolder",
    "RunState",
    "SASRecConfig",
    "Schedule",
    "Scored",
    "Softmax",
    "SplitOptions",
    "SquaredError",
    "StreamOptions",
    "StreamTrainer",
    "SyntheticClicks",
    "SyntheticImpressions",
    "TableSource",
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

# Lazy: the modules import most of the library, which servers and commands that only read runs never need.
import_on_use(__name__)
