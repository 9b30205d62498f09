"""Test AUC of the recipe that ``meshrec inspect`` writes, unedited, beside scikit-learn's logistic
regression.

The data is the packaged ratings in one Parquet file, split by time. The regression has a column for each ID
and each dense value that the recipe's features make, and scikit-learn's default penalty.
"""

import contextlib
import io
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.harness import Bar, Result, table
from meshrec.metrics import area_under_curve

if TYPE_CHECKING:
    from meshrec.data import Dataset, Reader
    from meshrec.train import RunFolder

_BATCH = 8192


def write_ratings(path: Path) -> None:
    """Write the packaged ratings with their movies' genres and years: user, item, genres, year, time,
    rating.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    from meshrec.data.faults import Faults
    from meshrec.data.movielens_files import load_packaged

    raw = load_packaged(Faults("raise"))
    movies, wanted = raw.movies, raw.ratings["movie"]
    at = pc.index_in(wanted, value_set=pa.array(movies["movie"].to_pylist()))
    columns = {
        "user": raw.ratings["user"],
        "item": wanted,
        "genres": movies["genres"].take(at),
        "year": movies["year"].take(at),
        "time": raw.ratings["time"],
        "rating": raw.ratings["rating"],
    }
    pq.write_table(pa.table(columns), path)


def matrix(dataset: "Dataset", reader: "Reader") -> tuple[Any, Any]:
    """Build a sparse matrix with a count column for each ID of each feature, and a column for each dense
    value.
    """
    import numpy as np
    from scipy import sparse

    parts, labels = [], []
    for batch in reader.batches(_BATCH):
        blocks = [sparse.csr_matrix(batch.dense.numpy())]
        for feature in dataset.features:
            jagged = batch.sparse[feature.name]
            ends = np.concatenate([[0], jagged.lengths().numpy().cumsum()])
            ids = jagged.values().numpy()
            shape = (len(batch), feature.num_embeddings)
            blocks.append(sparse.csr_matrix((np.ones(len(ids)), ids, ends), shape=shape))
        parts.append(sparse.hstack(blocks, format="csr"))
        labels.append(batch.labels.numpy())
    return sparse.vstack(parts, format="csr"), np.concatenate(labels)


def regression(dataset: "Dataset", judged: "Reader") -> tuple[Tensor, Tensor]:
    """Return the logits of scikit-learn's default logistic regression on ``judged``, and the labels."""
    from sklearn.linear_model import LogisticRegression

    fitted = LogisticRegression(max_iter=1000).fit(*matrix(dataset, dataset.train))
    samples, labels = matrix(dataset, judged)
    return torch.from_numpy(fitted.decision_function(samples)), torch.from_numpy(labels)


def proposed(data: Path, folder: Path, label: str, *more: str) -> "RunFolder":
    """Run ``meshrec inspect`` and ``meshrec train`` without editing anything in between."""
    from meshrec.cli.inspect import main as inspect
    from meshrec.cli.train import main as train
    from meshrec.train.run_folder import find_run

    recipe = folder / "recipe.py"
    with contextlib.redirect_stdout(io.StringIO()) as told:
        arguments = [str(data), "--label", label, "--time", "time", "--out", str(recipe)]
        failed = inspect(arguments) or train(
            [f"{recipe}:recipe", "--runs", str(folder), "--name", "proposed", "--quiet", *more]
        )
    if failed:
        raise RuntimeError(f"the proposed recipe was not trained: {told.getvalue()}")
    return find_run("proposed", folder)


def measured(run: "RunFolder") -> dict[str, dict[str, float]]:
    """Return the AUCs on the test data, with bootstrap 95 % intervals."""
    from meshrec.metrics import bootstrap_intervals
    from meshrec.runs.quantize import trained_model
    from meshrec.train import join, score

    model, _, dataset, _ = trained_model(run)
    assert dataset.test is not None
    scored = list(score(model, dataset.test, join("cpu")))
    ours = torch.cat([each.logits_B for each in scored]), torch.cat([each.labels_B for each in scored])
    found = {}
    for name, (logits, labels) in {"ours": ours, "sklearn": regression(dataset, dataset.test)}.items():
        auc = area_under_curve(logits.double().flatten(), labels.double().flatten())
        assert auc is not None
        interval = bootstrap_intervals(logits.flatten(), labels.flatten())["auc"]
        found[name] = {"auc": auc, "low": interval.low, "high": interval.high}
    return found


def run(*, tiny: bool = False) -> Result:
    """Run the benchmark on the packaged ratings; ``tiny``: one epoch."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_ratings(folder / "ratings.parquet")
        more = ["--training.epochs", "1"] if tiny else []
        found = measured(proposed(folder / "ratings.parquet", folder, "rating", *more))
    rows = [
        [who, f"{each['auc']:.4f}", f"{each['low']:.4f}", f"{each['high']:.4f}"]
        for who, each in found.items()
    ]
    print(table(["test AUC", "", "from", "to"], rows), end="\n\n", flush=True)
    return Result(found, bars_of(found))


def bars_of(found: dict[str, dict[str, float]]) -> list[Bar]:
    asked = found["sklearn"]["auc"]
    return [Bar(name="test AUC of what inspect wrote", figure=found["ours"]["auc"], asked=asked, unit="")]
