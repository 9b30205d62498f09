#!/usr/bin/env bash
# onnxmltools 1.16.0: LightGBM 4.7.0 models trained with linear_tree, sigmoid, zero_as_missing, boosting "rf" or
# reg_sqrt.
# Guess: the program has the scores of predict(), or the conversion raises, as for the objectives "l1" and
# "cross_entropy".
# Seen: neither, without a warning. Leaves of linear trees lose their slopes, sigmoid=2 is taken for 1 (probabilities
# move towards 1/2), rows with a zero take the branch of a number, a random forest's mean becomes a sum (0 and 1 almost
# everywhere), and the square of reg_sqrt is left out. A model without these options has equal scores.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxmltools==1.16.0 skl2onnx==1.20.0 onnx==1.23.2 \
    onnxruntime==1.32.0 lightgbm==4.7.0 scikit-learn==1.9.1 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PY'
import lightgbm
import numpy as np
import onnxmltools
import onnxruntime
from onnxmltools.convert.common.data_types import FloatTensorType

onnxruntime.set_default_logger_severity(3)
generator = np.random.default_rng(0)
rows = generator.normal(size=(2000, 2)).astype(np.float32)
rows[generator.random(rows.shape) < 0.3] = 0
labels = (rows.sum(1) + 2 * (rows[:, 0] == 0) + generator.normal(size=2000) > 1).astype(float)


def difference(**options):
    """Return the largest difference of scores, and the share of rows that differ by more than 0.001."""
    options = {"objective": "binary", "num_leaves": 8, "verbose": -1, "num_threads": 1, "deterministic": True} | options
    model = lightgbm.train(options, lightgbm.Dataset(rows, labels), 10)
    types = [("rows", FloatTensorType([None, 2]))]
    program = onnxmltools.convert_lightgbm(model, initial_types=types, zipmap=False).SerializeToString()
    scores = onnxruntime.InferenceSession(program).run(None, {"rows": rows})[-1]
    differences = np.abs(scores.reshape(2000, -1)[:, -1] - model.predict(rows))
    return round(float(differences.max()), 3), float((differences > 0.001).mean())


assert difference() == (0, 0)
for options in (
    {"linear_tree": True},
    {"sigmoid": 2.0},
    {"zero_as_missing": True},
    {"boosting": "rf", "bagging_freq": 1, "bagging_fraction": 0.5},
    {"objective": "regression", "reg_sqrt": True},
):
    largest, share = difference(**options)
    print(options, largest, share)
    assert largest > 0.1 and share > 0.1
PY
