"""The recipe that ``meshrec inspect`` writes, unedited, beside logistic regression and LightGBM.

Eight tables from packages, three seeds each. A seed draws the split, or only the weights where rows are split
by time. All three models learn from the same training rows and choose on the same validation rows: the
recipe its weights, the regression its penalty, LightGBM its number of trees. The test rows are read once.
"""

import contextlib
import importlib.util
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.default_tables import LABEL, REPORTED, TUNED, Table, write
from benchmarks.harness import Bar, Result, selected, table

_PENALTIES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_BATCH = 8192
_SEEDS = 3
_HAS_LIGHTGBM = importlib.util.find_spec("lightgbm") is not None


def recipe_of(data: Path, asked: Table, folder: Path) -> Path:
    """Write the recipe that `meshrec inspect` proposes for a table."""
    from meshrec.cli.inspect import main as inspect

    recipe = folder / "recipe.py"
    arguments = [str(data), "--label", LABEL, "--out", str(recipe), "--force"]
    arguments += [] if asked.time is None else ["--time", asked.time]
    with contextlib.redirect_stdout(io.StringIO()) as told:
        if inspect(arguments):
            raise RuntimeError(f"no recipe: {told.getvalue()}")
    return recipe


def loaded(recipe: Path, seed: int) -> Any:
    """Return the recipe of a file, with other seeds."""
    from dataclasses import replace

    from meshrec.train import resolve

    found = resolve(f"{recipe}:recipe")
    training = replace(found.training, seed=seed)
    return replace(found, data=replace(found.data, seed=seed), training=training)


def trained(recipe: Any) -> dict[str, float]:
    """Train a recipe in this process; return its AUCs, and the rows of each part of the data."""
    from dataclasses import replace

    from meshrec.train import Placement, Trainer, join

    recipe = replace(recipe, placement=replace(Placement(), sharded=False))
    trainer = Trainer(recipe, recipe.data.load(), join("cpu"))
    trainer.run()
    return {
        "validation": trainer.validation["auc"],
        "test": trainer.test["auc"],
        "step": trainer.evaluator.early.best_step,
        "steps": trainer.progress.step,
        "of": trainer.num_steps,
    }


def rows_of(dataset: Any) -> dict[str, Any]:
    """Return the row numbers of each part of the data."""
    parts = {"train": dataset.train, "validation": dataset.validation, "test": dataset.test}
    return {
        name: np.sort(np.concatenate([batch.rows.numpy() for batch in reader.batches(_BATCH)]))
        for name, reader in parts.items()
    }


def rivals(frame: Any, asked: Table, rows: dict[str, Any], seed: int) -> dict[str, float]:
    """Return the test AUCs of logistic regression on all fields, and of LightGBM."""
    from sklearn.metrics import roc_auc_score

    fields = frame.drop(columns=[LABEL] + ([] if asked.time is None else [asked.time]))
    fields = _plain(fields)
    labels = frame[LABEL].to_numpy()
    scores = {"logistic": _logistic, "lightgbm": _lightgbm} if _HAS_LIGHTGBM else {"logistic": _logistic}
    return {
        name: float(roc_auc_score(labels[rows["test"]], score(fields, labels, rows, seed)))
        for name, score in scores.items()
    }


def _plain(fields: Any) -> Any:
    """Convert times to numbers, and drop columns of text whose values differ in almost every row."""
    import pandas

    fields = fields.copy()
    for name in list(fields):
        column = fields[name]
        if pandas.api.types.is_datetime64_any_dtype(column):
            fields[f"{name}_hour"] = column.dt.hour.astype(str)
            fields[f"{name}_weekday"] = column.dt.weekday.astype(str)
            fields[name] = column.astype("int64") / 1e18
        elif not pandas.api.types.is_numeric_dtype(column) and column.nunique() > 0.9 * len(column):
            fields = fields.drop(columns=name)
    return fields


def _logistic(fields: Any, labels: Any, rows: dict[str, Any], seed: int) -> Any:
    """Fit logistic regression: numbers are standardised and clipped; texts and frequent integers have a
    weight per value.
    """
    import pandas
    from scipy import sparse
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    train, parts = rows["train"], []
    for name in fields:
        column = fields[name]
        numeric = pandas.api.types.is_numeric_dtype(column)
        if numeric:
            values = column.to_numpy(np.float64)
            missing = ~np.isfinite(values)
            values = np.where(missing, np.nanmedian(values[train]), values)
            low, high = np.quantile(values[train], (0.001, 0.999))
            values = np.clip(values, low, high)
            values = (values - values[train].mean()) / max(values[train].std(), 1e-9)
            parts.append(sparse.csr_matrix(np.stack([values, missing], 1)))
        whole = numeric and pandas.api.types.is_integer_dtype(column)
        if not numeric or (whole and column.nunique() * 20 <= len(column)):
            texts = [str(each) for each in column]
            many = not numeric and column.astype(str).str.len().mean() > 60
            vector = (
                CountVectorizer()
                if many
                else CountVectorizer(tokenizer=lambda text: text.split("|"), token_pattern=None)
            )
            vector.fit([texts[row] for row in train])
            parts.append(vector.transform(texts).astype(np.float64))
    data = sparse.hstack(parts, format="csr")
    best = (0.0, None)
    for penalty in _PENALTIES:
        model = LogisticRegression(C=penalty, max_iter=400).fit(data[train], labels[train])
        judged = roc_auc_score(labels[rows["validation"]], model.decision_function(data[rows["validation"]]))
        best = max(best, (judged, model), key=lambda each: each[0])
    return best[1].decision_function(data[rows["test"]])


def _lightgbm(fields: Any, labels: Any, rows: dict[str, Any], seed: int) -> Any:
    """Return LightGBM's scores of the test data. Texts are categories.

    Trees are added until 100 in a row do not improve the validation data.
    """
    import lightgbm
    import pandas

    fields = fields.copy()
    for name in fields:
        if not pandas.api.types.is_numeric_dtype(fields[name]):
            fields[name] = fields[name].astype("category")
    fields.columns = [f"f{number}" for number in range(fields.shape[1])]
    parts = {name: fields.iloc[each] for name, each in rows.items()}
    model = lightgbm.LGBMClassifier(
        n_estimators=3000, learning_rate=0.05, n_jobs=1, random_state=seed, verbose=-1
    )
    model.fit(
        parts["train"],
        labels[rows["train"]],
        eval_set=[(parts["validation"], labels[rows["validation"]])],
        eval_metric="auc",
        callbacks=[lightgbm.early_stopping(100, verbose=False, first_metric_only=True)],
    )
    return model.predict_proba(parts["test"])[:, 1]


def compared(name: str, asked: Table, seed: int, folder: Path) -> dict[str, Any]:
    """Return the test AUCs of the default recipe and its rivals on one table, and the gap to the better."""
    import pandas

    data = write(name, folder)
    recipe = loaded(recipe_of(data, asked, folder), seed)
    others = rivals(pandas.read_parquet(data), asked, rows_of(recipe.data.load()), seed)
    ours = trained(recipe)
    return {"ours": ours["test"], **others, "gap": ours["test"] - max(others.values()), **ours}


def run(*, tiny: bool = False, only: Sequence[str] = ()) -> Result:
    """Run the benchmark. Without LightGBM, logistic regression is the only rival, and one line says so.

    Args:
        tiny: whether to try one table and one seed only.
        only: names of tables, also of those on which the recipe's options were chosen; by default the
            others.
    """
    if not _HAS_LIGHTGBM:
        print("LightGBM is not installed: the rival is logistic regression alone")
    names = ["spam"] if tiny else selected(list(TUNED | REPORTED), only) if only else list(REPORTED)
    figures: dict[str, Any] = {}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            asked = (TUNED | REPORTED)[name]
            found = figures[name] = [
                compared(name, asked, seed, Path(folder)) for seed in range(1 if tiny else _SEEDS)
            ]
            means = {key: float(np.mean([each[key] for each in found])) for key in found[0]}
            shown = [f"{means[key]:.4f}" if key in means else "-" for key in ("ours", "logistic", "lightgbm")]
            rows.append([name, *shown, f"{means['gap']:+.4f}"])
            print(*rows[-1], flush=True)
    print(table(["test AUC", "ours", "logistic regression", "LightGBM", "gap"], rows), end="\n\n", flush=True)
    gaps = [float(np.mean([each["gap"] for each in found])) for found in figures.values()]
    bars = [
        Bar("mean gap of the test AUC to the better rival", float(np.mean(gaps)), -0.002, unit=""),
        Bar("worst table's gap", min(gaps), -0.006, unit=""),
    ]
    return Result(figures, bars)
