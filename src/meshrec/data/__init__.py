"""Data sets, and readers that stream them in batches."""

from meshrec.data.batch import Batch
from meshrec.data.criteo import criteo
from meshrec.data.dataset import Dataset, Feature, Position, Reader, embedding_bag_configs
from meshrec.data.faults import DataError
from meshrec.data.in_memory import InMemoryReader, Ranges
from meshrec.data.movielens import movielens
from meshrec.data.parquet import parquet
from meshrec.data.prefetch import Prefetch, prefetch
from meshrec.data.schema import DenseColumn, IdColumn, Schema
from meshrec.data.streaming import Source, StreamReader
from meshrec.data.synthetic import synthetic_clicks

__all__ = [
    "Batch",
    "DataError",
    "Dataset",
    "DenseColumn",
    "Feature",
    "IdColumn",
    "InMemoryReader",
    "Position",
    "Prefetch",
    "Ranges",
    "Reader",
    "Schema",
    "Source",
    "StreamReader",
    "criteo",
    "embedding_bag_configs",
    "movielens",
    "parquet",
    "prefetch",
    "synthetic_clicks",
]
