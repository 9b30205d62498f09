#!/usr/bin/env bash
# LightGBM 4.7.0 and CatBoost 1.2.10: ranking metrics of queries that have no relevant item (no click).
# Guess: such a query is left out of the mean, or counts as 0 as in scikit-learn, in one library as in the other.
# Seen: one query with its click on the last of 3 positions, and two without clicks. LightGBM counts the two as 1 in
# ndcg and map. CatBoost counts them as 1 in NDCG and RecallAt, and as 0 in MAP, MRR and PrecisionAt. So NDCG@1 is
# 2/3 although the only click was missed, MAP is 7/9 in one and 1/9 in the other, and a log with more queries without
# clicks looks better. (A comment in the source of LightGBM's metric says so.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check lightgbm==4.7.0 catboost==1.2.10 numpy==2.4.6
cd "$folder"
venv/bin/python -W ignore - <<'PY'
import lightgbm
import numpy as np
from catboost.utils import eval_metric

labels, scores, queries = np.array([0, 0, 1] + [0] * 6), np.array([3.0, 2.0, 1.0] * 3), np.repeat([0, 1, 2], 3)
data = lightgbm.Dataset(np.zeros((9, 1)), labels, group=[3, 3, 3], init_score=scores)
options = {"objective": "lambdarank", "metric": "ndcg,map", "ndcg_eval_at": [1, 3], "verbose": -1}
seen = {}
# The feature is constant, so that no tree changes the scores.
lightgbm.train(options, data, 1, valid_sets=[data], callbacks=[lightgbm.record_evaluation(seen)])
first = {name: round(float(values[0]), 4) for name, values in seen["training"].items()}
names = ("NDCG:top=1", "MAP:top=3", "MRR", "RecallAt:top=1", "PrecisionAt:top=1")
second = {name: round(eval_metric(labels, scores, name, group_id=queries)[0], 4) for name in names}
print("LightGBM", first)
print("CatBoost", second)
assert first == {"ndcg@1": 0.6667, "ndcg@3": 0.8333, "map@1": 0.6667, "map@3": 0.7778}
assert list(second.values()) == [0.6667, 0.1111, 0.1111, 0.6667, 0.0]
PY
