#!/usr/bin/env bash
# onnxruntime 1.32.0 on x86-64: Sigmoid in float32 for logits below -12, the scores of rare clicks.
# Guess: the relative error of a float32 formula, below 1e-6, down to logits of -87, and an order equal to the logits'.
# Seen: scores are multiples of 2^-25 or so, as the kernel adds 1/2 to a rational function: at -16 the score is half of
# the true one, a logit of -16 scores below one of -17, and below -18 every score is 0, so that a click has an
# infinite log loss and all such items tie. The error is absolute (6e-8), and a test with atol=1e-5 passes.
# Export logits, and apply the sigmoid elsewhere.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PY'
import numpy as np
import onnxruntime
from onnx import TensorProto, helper

values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None]) for name in ("logits", "scores")]
graph = helper.make_graph([helper.make_node("Sigmoid", ["logits"], ["scores"])], "model", values[:1], values[1:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def scores(logits):
    return session.run(None, {"logits": logits.astype(np.float32)})[0]


logits = np.linspace(-18, -12, 601, dtype=np.float32)
true = 1 / (1 + np.exp(-logits.astype(np.float64)))
relative = np.abs(scores(logits) / true - 1)
inversions = int((np.diff(scores(logits)) < 0).sum())
print(onnxruntime.__version__, scores(np.arange(-20, -14)), "largest relative error", relative.max(), inversions)
assert relative.max() > 0.3 and inversions > 50 and np.abs(scores(logits) - true).max() < 1e-7
assert (scores(np.array([-20.0, -30.0, -80.0])) == 0).all()
PY
