"""Streams by their addresses, and data sets that describe their samples."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshrec.data.batch import Batch
from meshrec.data.dataset import Dataset, Reader, RowsOfFile
from meshrec.data.encoding import Encoding
from meshrec.data.faults import OnError
from meshrec.data.follow import Follow
from meshrec.data.open_broker import is_broker
from meshrec.data.streams import Stream
from meshrec.data.tables import training_dataset


def open_stream(
    source: str | Path,
    features: Encoding,
    *,
    on_error: OnError = "raise",
    set_aside: Path | None = None,
    step_log: Path | None = None,
) -> Stream:
    """Open a stream by its address.

    Args:
        source: folder, or its address in a store, for `Follow`; address of Redis streams or Kafka topics, for
            `meshrec.data.broker_stream.BrokerStream`.
        features: fitted features that encode the records.
        on_error: "raise" for damaged records, or "skip" to count and omit them.
        set_aside: folder that receives omitted records; None: they are only counted.
        step_log: as for `BrokerStream`. A folder needs none.

    Raises:
        ValueError: the address is wrong.
    """
    if is_broker(source):
        from meshrec.data.broker_stream import BrokerStream

        return BrokerStream(str(source), features, on_error=on_error, set_aside=set_aside, step_log=step_log)
    return Follow(source, features, on_error=on_error, set_aside=set_aside)


def stream_dataset(stream: Stream, features: Encoding, *, epoch_samples: int = 0) -> Dataset:
    """Create a dataset that describes the samples of a stream, and has no samples.

    Args:
        stream: the stream.
        features, epoch_samples: as for `empty_dataset`.
    """
    dataset = empty_dataset(features, epoch_samples=epoch_samples)
    return replace(dataset, skipped=stream.faults.by_file)


def empty_dataset(features: Encoding, *, epoch_samples: int = 0) -> Dataset:
    """Create a dataset that describes samples, and has none.

    Args:
        features: fitted features that encode the records.
        epoch_samples: number of samples that count as an epoch, for options per epoch; 0: unknown.
    """
    return training_dataset(features, _NoSamples(epoch_samples), "stream")


class _NoSamples(Reader):
    """Reader without samples.

    Args:
        num_samples: number of samples that count as an epoch.
    """

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    @property
    def num_samples(self) -> int:
        return self._num_samples

    @property
    def files(self) -> Sequence[RowsOfFile]:
        return ()

    def batches(self, batch_size: int, **_: Any) -> Iterator[Batch]:
        """Yield nothing, whatever the batch size."""
        return iter(())
