#!/usr/bin/env bash
# torch 2.13.0: torch.ao.quantization turns an nn.EmbeddingBag into one that sums, whatever its mode is.
# Guess: the quantized bag averages, as nn.EmbeddingBag does by default, or the conversion refuses the mode.
# Seen: rows of ones give 2 for a bag of two IDs under modes "mean" and "max", and 2 for a bag with a padding ID, which
# counts. There is no warning. The module keeps the mode as an attribute, but its forward() passes the operators
# quantized::embedding_bag_byte and _4bit the constant 0, the code of a sum.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cd "$folder"
venv/bin/python -W ignore - <<'PY'
import torch
from torch.ao.quantization import float_qparams_weight_only_qconfig, quantize_dynamic

IDS, OFFSETS = torch.tensor([1, 2, 3]), torch.tensor([0, 2])


def pooled(**options):
    bag = torch.nn.EmbeddingBag(4, 4, **options)
    torch.nn.init.ones_(bag.weight)
    model = torch.nn.Sequential(bag)
    config = {torch.nn.EmbeddingBag: float_qparams_weight_only_qconfig}
    quantized = quantize_dynamic(model, config, dtype=torch.quint8)[0]
    assert "quantized" in type(quantized).__module__
    return bag(IDS, OFFSETS)[:, 0].tolist(), quantized(IDS, OFFSETS)[:, 0].tolist()


seen = [pooled(mode="mean"), pooled(mode="max"), pooled(mode="sum", padding_idx=1), pooled(mode="sum")]
print(torch.__version__, *seen)
assert [plain for plain, _ in seen] == [[1, 1], [1, 1], [1, 1], [2, 1]]
assert all(quantized == [2, 1] for _, quantized in seen)
PY
