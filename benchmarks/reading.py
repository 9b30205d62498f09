"""Throughput of one core that reads Criteo-shaped Parquet, beside the DLRM step that consumes the samples.

The reader is measured in CPU seconds of the process, with decompression and hashing. Samples are compared
with those that were written before anything is timed.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.clicks_model import Shape
from benchmarks.harness import Bar, Effort, Result, measure, table, threads
from meshrec import EmbeddingBagCollection, fuse
from meshrec.data import Batch, Dataset, parquet
from meshrec.data.features import Features, Hashed, Integer, Label, Number
from meshrec.models import DLRM, DLRMTrain
from meshrec.optim import RowWiseAdagrad


@dataclass(frozen=True, kw_only=True)
class Written(Shape):
    """The model of the step benchmark, and the number of samples in the files."""

    samples: int = 131_072
    row_group: int = 32_768


TINY = Written(
    num_tables=4, num_rows=100, batch=32, dim=8, bottom=(16, 8), top=(16, 1), samples=256, row_group=100
)


def run(effort: Effort, *, tiny: bool = False) -> Result:
    """Write, verify, time and compare with the bar."""
    shape = TINY if tiny else Written()
    with threads(1), tempfile.TemporaryDirectory() as folder:
        written = write(Path(folder) / "part.parquet", shape)
        readers = {
            "lists of ids": load(folder, shape, hashed=False),
            "lists, hashed": load(folder, shape, hashed=True),
        }
        verify(readers["lists of ids"], written, shape)
        rates = {
            name: max(read(dataset, shape) for _ in range(1 + effort.rounds // 3))
            for name, dataset in readers.items()
        }
        step = measure({"step": training_step(readers["lists of ids"], shape)}, effort)["step"]
    consumed = 1e3 * shape.batch / step.median
    rows = [[name, f"{rate:,.0f}", f"{rate / consumed:.1f}x"] for name, rate in rates.items()]
    rows.append(["the DLRM step, one thread", f"{consumed:,.0f}", "1.0x"])
    print(table(["one core", "samples/s", ""], rows))
    figures = {"samples_per_second": rates, "step_samples_per_second": consumed}
    return Result(figures, [Bar("reading against the step", min(rates.values()) / consumed, 3.0)])


def write(path: Path, shape: Written) -> dict[str, int]:
    """Write a file of random samples; return the sum of every ID column."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    columns: dict[str, object] = {"label": (rng.random(shape.samples) < 0.25).astype(np.float32)}
    for number in range(shape.dense_in):
        columns[f"I{number + 1}"] = rng.integers(0, 1000, shape.samples).astype(np.int32)
    offsets = pa.array(np.arange(shape.samples + 1) * shape.bag, pa.int32())
    sums = {}
    for number in range(shape.num_tables):
        ids = rng.integers(0, shape.num_rows, shape.samples * shape.bag)
        sums[f"C{number + 1}"] = int(ids.sum())
        columns[f"C{number + 1}"] = pa.ListArray.from_arrays(offsets, pa.array(ids))
    pq.write_table(pa.table(columns), path, row_group_size=shape.row_group)
    return sums


def load(folder: str, shape: Written, *, hashed: bool) -> Dataset:
    kind = Hashed if hashed else Integer
    schema = Features(
        labels=(Label(column="label"),),
        features=(
            *(Number(name=f"I{number + 1}", log=True) for number in range(shape.dense_in)),
            *(
                kind(name=f"C{number + 1}", num_embeddings=shape.num_rows, average_length=float(shape.bag))
                for number in range(shape.num_tables)
            ),
        ),
    )
    return parquet(train=folder, schema=schema)


def verify(dataset: Dataset, written: dict[str, int], shape: Written) -> None:
    """Check that every ID was read once."""
    read = dict.fromkeys(written, 0)
    num = 0
    for batch in dataset.train.batches(shape.batch):
        num += len(batch)
        for key, jagged in batch.sparse.to_dict().items():
            read[key] += int(jagged.values().sum())
    if read != written or num != shape.samples:
        raise AssertionError(f"read {num} samples with sums {read}, written {shape.samples} with {written}")


def read(dataset: Dataset, shape: Written) -> float:
    """Return the samples per CPU second of one epoch."""
    start = time.process_time()
    num = sum(len(batch) for batch in dataset.train.batches(shape.batch))
    return num / (time.process_time() - start)


def training_step(dataset: Dataset, shape: Written) -> Callable[[], None]:
    torch.manual_seed(0)
    collection = EmbeddingBagCollection(tables=dataset.tables(shape.dim))
    model = DLRM(collection, shape.dense_in, shape.bottom, shape.top)
    train = DLRMTrain(fuse(model, optimizer=RowWiseAdagrad(lr=0.02)))
    dense = [parameter for name, parameter in train.named_parameters() if "embedding_bags" not in name]
    optimizer = torch.optim.Adagrad(dense, lr=0.02)
    batch: Batch = next(iter(dataset.train.batches(shape.batch)))

    def step() -> None:
        optimizer.zero_grad()
        loss, _ = train(batch)
        loss.backward()
        optimizer.step()

    return step
