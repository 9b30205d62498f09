#!/usr/bin/env bash
# XGBoost 3.2.0: eval_metric "auc" of a ranking objective.
# Guess: the mean over queries of the usual AUC. If the one clicked item of ten is ranked first, 1, whatever the order of
# rows; a query without a click has no AUC and is left out; a query of two items, one clicked, counts like others.
# Seen: 1 or 0.2, anything from 0 to 1, and NaN. Pairs of equal labels count, too: as right if the row that comes first
# has the greater score, half if the scores are equal, wrong otherwise. They are 36 of the 45 pairs of the first query.
# So a click that is ranked last has 0.8 if the other rows lie by falling scores, and 0 if they lie by rising ones;
# long lists with few clicks have about 1/2, whatever the model is. Queries of two items are left out; if all are such,
# it is NaN. (The documentation says that pairs of documents are compared "to count correctly sorted pairs".)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check xgboost-cpu==3.2.0 numpy==2.4.6
cd "$folder"
venv/bin/python -W ignore - <<'PY'
import numpy as np
import xgboost


def area(labels, scores, sizes):
    """Return the metric of these scores. The only feature is constant, so that no tree changes them."""
    data = xgboost.DMatrix(np.zeros((len(labels), 1)), np.array(labels), base_margin=np.array(scores))
    data.set_group(sizes)
    options = {"objective": "rank:pairwise", "lambdarank_pair_method": "mean", "eval_metric": "auc", "verbosity": 0}
    return round(float(xgboost.train(options, data, 1).eval(data).rsplit(":", 1)[1]), 4)


falling = list(range(10, 0, -1))
rising = falling[::-1]
seen = {
    "click ranked first, rows by falling scores": area([1] + [0] * 9, falling, [10]),
    "click ranked first, rows by rising scores": area([0] * 9 + [1], rising, [10]),
    "click ranked last, rows by falling scores": area([0] * 9 + [1], falling, [10]),
    "click ranked last, rows by rising scores": area([1] + [0] * 9, rising, [10]),
    "no click, rows by falling scores": area([0] * 10, falling, [10]),
    "no click, rows by rising scores": area([0] * 10, rising, [10]),
    "no click, equal scores": area([0] * 10, [0] * 10, [10]),
    "click ranked first of 3, and last of 2": area([1, 0, 0, 0, 1], [3, 2, 1, 2, 1], [3, 2]),
    "click ranked first of 2": area([1, 0], [2, 1], [2]),
}
for name, value in seen.items():
    print(name, value)
assert list(seen.values())[:-1] == [1, 0.2, 0.8, 0, 1, 0, 0.5, 1] and np.isnan(seen["click ranked first of 2"])
PY
