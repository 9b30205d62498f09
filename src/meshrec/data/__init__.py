"""Data sets, and readers that stream them in batches."""

from meshrec.data.batch import Batch
from meshrec.data.dataset import Dataset, Feature, Position, Reader, embedding_bag_configs
from meshrec.data.faults import DataError
from meshrec.data.in_memory import InMemoryReader, Ranges
from meshrec.data.movielens import movielens
from meshrec.data.prefetch import Prefetch, prefetch
from meshrec.data.streaming import Source, StreamReader
from meshrec.data.synthetic import synthetic_clicks

__all__ = [
    "Batch",
    "DataError",
    "Dataset",
    "Feature",
    "InMemoryReader",
    "Position",
    "Prefetch",
    "Ranges",
    "Reader",
    "Source",
    "StreamReader",
    "embedding_bag_configs",
    "movielens",
    "prefetch",
    "synthetic_clicks",
]
