"""Packages that open at once, and a program that serves them."""

import json
import sys
from pathlib import Path

import torch

from meshrec.export import CheckedPackage, PackageError

FEATURES = ["user", "item"]
NUM_ROWS, NUM_DENSE = 50, 3


class Toy:
    """What a server needs of `meshrec.export.Predictor`; scores depend on every id, and on the package."""

    def __init__(self, folder: Path | CheckedPackage, *, copy_weights: bool = False) -> None:
        folder = folder.folder if isinstance(folder, CheckedPackage) else Path(folder)
        path = folder / "manifest.json"
        if not path.is_file():
            raise PackageError(f"{folder} is no package. Export a model.")
        self.features, self.num_dense = FEATURES, NUM_DENSE
        self.rows = dict.fromkeys(FEATURES, NUM_ROWS)
        self.outputs, self.shared, self.raw = "scores", frozenset(), None
        self.quantised, self.rounding, self.items = {}, None, None
        self.about, self.is_compiled = {"run": "r", "step": 10}, True
        self.weights = {"table": torch.zeros(NUM_ROWS, 64), "bias": torch.zeros(1)}
        self._scale = json.loads(path.read_text())["scale"]
        self.version = f"v{self._scale}"

    def check_weights(self):
        """Nothing is mapped."""

    def run(self, dense, values, lengths, group=None):
        assert group is None
        logits = dense.sum(1)
        for place, (ids, own) in enumerate(zip(values, lengths, strict=True)):
            sample = torch.repeat_interleave(torch.arange(len(own)), own)
            logits = logits.index_add(0, sample, torch.sin(ids.float() + place))
            rows = self.weights["table"][ids]
            assert (rows == rows[:, :1]).all(), "half a row"
            logits = logits.index_add(0, sample, rows[:, 0])
        return torch.sigmoid((logits + self.weights["bias"]) / self._scale)


def check_toy(folder, *, verify=True, public_key=None):
    """What a server needs of `meshrec.export.check_package`."""
    return CheckedPackage(Path(folder).resolve(), {}, "", None)


def open_with(patch, predictor, check):
    """Servers open packages by this class, after this check."""
    for place in ("models", "trial"):
        patch.setattr(f"meshrec.serve.{place}.Predictor", predictor)
    patch.setattr("meshrec.serve.models.check_package", check)


def make_toy(folder, scale):
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"scale": scale}))
    return folder


if __name__ == "__main__":
    import meshrec.export

    meshrec.export.Predictor = Toy  # before the server takes it from there
    meshrec.export.check_package = check_toy
    from meshrec.cli import serve

    sys.exit(serve.main(sys.argv[1:]))
