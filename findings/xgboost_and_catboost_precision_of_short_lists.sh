#!/usr/bin/env bash
# XGBoost 3.2.0 and CatBoost 1.2.10: precision at 5 of a query with two items.
# Guess: hits / 5, as precision at k is defined, and as trec_eval (pytrec_eval-terrier 0.5.11) counts: 2/5 at best.
# Seen: 1 in XGBoost ("pre@5") and CatBoost ("PrecisionAt:top=5"): hits / min(5, items). So a query with one relevant
# item in two counts more (1/2) than one with two relevant items in the first five of a hundred (2/5), and lists that
# were cut by a filter have the best precision.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check xgboost-cpu==3.2.0 catboost==1.2.10 numpy==2.4.6 \
    pytrec_eval-terrier==0.5.11
cd "$folder"
venv/bin/python -W ignore - <<'PY'
import numpy as np
import pytrec_eval
import xgboost
from catboost.utils import eval_metric


def precision(labels):
    """Return the precision at 5 of items in falling order of scores, in three libraries."""
    labels, scores = np.array(labels), np.arange(len(labels), 0, -1.0)
    # The only feature is constant, so that no tree changes the scores.
    data = xgboost.DMatrix(np.zeros((len(labels), 1)), labels, base_margin=scores)
    data.set_group([len(labels)])
    options = {"objective": "rank:pairwise", "lambdarank_pair_method": "mean", "eval_metric": "pre@5", "verbosity": 0}
    first = float(xgboost.train(options, data, 1).eval(data).rsplit(":", 1)[1])
    (second,) = eval_metric(labels, scores, "PrecisionAt:top=5", group_id=np.zeros(len(labels), int))
    truth = {str(item): int(label) for item, label in enumerate(labels)}
    ranking = {str(item): score for item, score in enumerate(scores)}
    third = pytrec_eval.RelevanceEvaluator({"q": truth}, {"P_5"}).evaluate({"q": ranking})["q"]["P_5"]
    return [round(float(value), 4) for value in (first, second, third)]


short, half, long = precision([1, 1]), precision([1, 0]), precision([1, 1] + [0] * 98)
print("XGBoost, CatBoost, trec_eval:", short, half, long)
assert short == [1, 1, 0.4] and half == [0.5, 0.5, 0.2] and long == [0.4, 0.4, 0.4]
PY
