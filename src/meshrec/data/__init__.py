"""Datasets, and readers that stream them in batches."""

from typing import TYPE_CHECKING

# Two functions have the name of their module, which an import of that module would put in their place.
from meshrec.data.parquet import parquet
from meshrec.data.prefetch import Prefetch, prefetch
from meshrec.lazy import import_on_use

if TYPE_CHECKING:
    from meshrec.data.batch import Batch
    from meshrec.data.broker_stream import BrokerStream
    from meshrec.data.criteo_data import criteo
    from meshrec.data.dataset import (
        Dataset,
        Feature,
        FileRows,
        Position,
        Reader,
        RowsOfFile,
        embedding_bag_configs,
        locate,
    )
    from meshrec.data.faults import DataError
    from meshrec.data.folder_join import FolderJoin
    from meshrec.data.follow import FilePosition, Follow
    from meshrec.data.in_memory import InMemoryReader, Ranges
    from meshrec.data.interactions import Interactions
    from meshrec.data.joined_stream import JoinedStream
    from meshrec.data.label_join import LabelJoin
    from meshrec.data.movielens_data import movielens
    from meshrec.data.next_item_data import next_items
    from meshrec.data.splitting import Split
    from meshrec.data.streaming import Source, StreamReader
    from meshrec.data.synthetic import drifting_clicks, synthetic_clicks
    from meshrec.data.synthetic_logs import SyntheticLog, synthetic_log

__all__ = [
    "Batch",
    "BrokerStream",
    "DataError",
    "Dataset",
    "Feature",
    "FilePosition",
    "FileRows",
    "FolderJoin",
    "Follow",
    "InMemoryReader",
    "Interactions",
    "JoinedStream",
    "LabelJoin",
    "Position",
    "Prefetch",
    "Ranges",
    "Reader",
    "RowsOfFile",
    "Source",
    "Split",
    "StreamReader",
    "SyntheticLog",
    "criteo",
    "drifting_clicks",
    "embedding_bag_configs",
    "locate",
    "movielens",
    "next_items",
    "parquet",
    "prefetch",
    "synthetic_clicks",
    "synthetic_log",
]

import_on_use(__name__)
