#!/bin/sh
# torchmetrics 1.9.0: AUROC of float32 logits forgets the order of all logits above 17.
#
# Guess: AUC depends on the order of the scores only, so that of logits 20, 30, 40 with labels 0, 1, 1 is 1.
# Behavior: scores outside [0, 1] are replaced by their sigmoid, which is 1.0 in float32 for all three: they are tied,
# and the AUC is 1/2. In float64 it is 1, and so it is if one divides the logits by 100.
# Output seen: float32 0.5 float64 1.0 divided 1.0
# Exits with 1 if that changes. PYTHON names the interpreter; its torch is used if it has one.
set -e
PYTHON=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$PYTHON" -c 'import torch, numpy, packaging' 2>/dev/null ||
    "$PYTHON" -m pip install --quiet --target "$folder" torch==2.10.0 numpy==2.2.6 packaging==25.0
"$PYTHON" -m pip install --quiet --no-deps --target "$folder" torchmetrics==1.9.0 lightning-utilities==0.15.2
cd "$folder"
PYTHONPATH="$folder" "$PYTHON" - <<'PYEOF'
import sys

import torch
import torchmetrics
from torchmetrics.functional.classification import binary_auroc

print("torchmetrics", torchmetrics.__version__, "torch", torch.__version__)
logits, labels = torch.tensor([20.0, 30.0, 40.0]), torch.tensor([0, 1, 1])
areas = [float(binary_auroc(scores, labels)) for scores in (logits, logits.double(), logits / 100)]
print("float32", areas[0], "float64", areas[1], "divided", areas[2])
sys.exit(areas != [0.5, 1.0, 1.0])
PYEOF
