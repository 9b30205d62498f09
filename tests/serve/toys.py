"""Packages that open at once, and a program that serves them."""

import copyreg
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import meshrec.export
from meshrec.export import CheckedPackage, PackageError

FEATURES = ["user", "item"]
NUM_ROWS, NUM_DENSE = 50, 3


ENDS = {
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "SIGBUS": lambda: os.kill(os.getpid(), signal.SIGBUS),
    "was ended by SIGKILL. It was killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "code 127": lambda: os._exit(127),
    "code 0": lambda: os._exit(0),
    "not finish": lambda: time.sleep(60),
    "MemoryError": lambda: bytearray(1 << 62),
}


class FoundByPath(type):
    """Classes that are pickled by the path of this file, as `tests` may be another package elsewhere."""


copyreg.pickle(
    FoundByPath,
    lambda found: (eval, (f"__import__('runpy').run_path({__file__!r})[{found.__name__!r}]",)),
)


class Toy(metaclass=FoundByPath):
    """What a server needs of `meshrec.export.Predictor`; scores depend on every id, and on the package.

    A toy whose manifest says how it ends (`ENDS`) ends the process that scores with it.
    """

    may_end = True

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
        self.hashed, self.any_ids = {}, frozenset()
        self.weights = {"table": torch.zeros(NUM_ROWS, 64), "bias": torch.zeros(1)}
        manifest = json.loads(path.read_text())
        self._scale, self.ends = manifest["scale"], manifest.get("ends")
        self.version = f"v{self._scale}"

    def check_weights(self):
        """Nothing is mapped."""

    def run(self, dense, values, lengths, group=None):
        assert group is None
        if self.ends is not None:
            assert self.may_end, "the server itself runs a package that was not tried out"
            ENDS[self.ends]()
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
    for place in ("models", "server"):
        patch.setattr(f"meshrec.serve.{place}.Predictor", predictor)
    patch.setattr("meshrec.serve.models.check_package", check)


def make_toy(folder, scale, **more):
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"scale": scale, **more}))
    return folder


def main():
    """Run ``meshrec serve`` with toys; return its exit code."""
    meshrec.export.Predictor = Toy  # before the server takes it from there
    meshrec.export.check_package = check_toy
    from meshrec.cli import serve

    return serve.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
