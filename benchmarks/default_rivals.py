"""Rivals of the default model: tuned logistic regression, and LightGBM with early stopping.

Run as ``python -m benchmarks.default_rivals DATA ROWS SEED SCORES``, the module only fits LightGBM, in a
process whose CPU time can be measured with its imports.
"""

import json
import sys
import time
from typing import Any

import numpy as np

from benchmarks.default_tables import LABEL

_PENALTIES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


def plain_fields(fields: Any) -> Any:
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


def logistic(fields: Any, labels: Any, rows: dict[str, Any]) -> Any:
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


def lightgbm(fields: Any, labels: Any, rows: dict[str, Any], seed: int) -> Any:
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


def main() -> None:
    """Fit LightGBM in this process, store its test scores, and print the CPU seconds of the fit as JSON."""
    import pandas

    data, rows_file, seed, scores = sys.argv[1:]
    frame, rows = pandas.read_parquet(data), dict(np.load(rows_file))
    time_column = str(rows.pop("time"))
    fields = plain_fields(frame.drop(columns=[LABEL] + ([time_column] if time_column else [])))
    start = time.process_time()
    np.save(scores, lightgbm(fields, frame[LABEL].to_numpy(), rows, int(seed)))
    print(json.dumps({"fit": time.process_time() - start}))


if __name__ == "__main__":
    main()
