"""A package served from Python: the compiled program, or the exported one where that does not fit."""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import meshrec.ops.tbe.naive  # noqa: F401 - the operators must exist
from meshrec.export.package import (
    COMPILED,
    EXPORTED,
    FORMAT,
    MANIFEST,
    WEIGHTS,
    PackageError,
    WeightRecord,
    digest_of,
    isa,
    operators,
)

_log = logging.getLogger(__name__)

# B samples, N ids

_Program = Callable[[list[Tensor], Tensor, list[Tensor], list[Tensor]], Tensor]


class Predictor:
    """Scores of a package's model. Its weights are mapped, not read: processes share them.

    Safe to call from several threads.

    Args:
        folder: what `meshrec.export.export` wrote.
        verify: compare every file with its checksum first (reads all of it).

    Attributes:
        features, num_dense: what a request must have.
        rows: rows of the table of each feature; a feature without tables that check ids is not in it.
        version: tells packages apart: a digest of all that is in it.
        weights: by name. Writing to them changes the scores of this predictor, and never the package.
        is_compiled: whether the compiled program serves; otherwise a log line says why not.
        about: what the exporter wrote down.

    Raises:
        PackageError: for a folder that is no package, is damaged, or is of a newer format.
    """

    def __init__(self, folder: str | Path, *, verify: bool = False) -> None:
        self.folder = Path(folder)
        manifest = _read_manifest(self.folder)
        self.version = digest_of(self.folder / MANIFEST)[:12]
        for name, digest in manifest["sha256"].items():
            if not (self.folder / name).is_file():
                raise PackageError(f"{self.folder / name} is missing. Export the model again.")
            if verify and digest_of(self.folder / name) != digest:
                raise PackageError(f"{self.folder / name} is not what was written. Export the model again.")
        self.features: list[str] = manifest["features"]
        self.num_dense: int = manifest["num_dense"]
        self.rows: dict[str, int] = manifest.get("rows", {})
        self.about: dict[str, Any] = manifest["about"]
        records = [WeightRecord(**record) for record in manifest["weights"]]
        self._weights = mapped(self.folder / WEIGHTS, records)
        self.weights = {r.name: w for r, w in zip(records, self._weights, strict=True)}
        reason = _why_not_compiled(manifest)
        self.is_compiled = reason is None
        if reason is None:
            # Not torch._inductor.aoti_load_package: that imports the compiler, which takes seconds.
            loader = torch._C._aoti.AOTIModelPackageLoader(str(self.folder / COMPILED), "model", False, 1, -1)
            self._program: _Program = lambda *inputs: loader.boxed_run(list(_flat(*inputs)))[0]
        else:
            _log.warning("%s: the exported program serves, as %s", self.folder, reason)
            self._program = torch.export.load(self.folder / EXPORTED).module()

    def __call__(self, dense: Tensor, values: Mapping[str, Tensor], lengths: Mapping[str, Tensor]) -> Tensor:
        """Scores [B] float32.

        Args:
            dense: [B, num_dense] float32.
            values: per feature ids [N] int64, those of the first sample first.
            lengths: per feature [B] int64, ids of each sample.

        Raises:
            ValueError: for a missing feature, wrong shapes or dtypes, lengths that do not sum, NaN, and ids
                outside their table.
        """
        self._check(dense, values, lengths)
        jagged = ([given[feature] for feature in self.features] for given in (values, lengths))
        return self.run(dense, *jagged)

    @torch.inference_mode()
    def run(self, dense: Tensor, values: list[Tensor], lengths: list[Tensor]) -> Tensor:
        """The same for a request that was checked, with ids and lengths in the order of ``features``.

        Raises:
            ValueError: for ids outside their table.
        """
        try:
            return self._program(self._weights, dense, values, lengths)
        except RuntimeError as error:
            # The compiled program passes on what an operator said of the ids, and where it was called.
            said = re.match(r"(?:ValueError: )?(table '.*)", str(error))
            if said is None:
                raise
            raise ValueError(said[1]) from error

    def _check(self, dense: Tensor, values: Mapping[str, Tensor], lengths: Mapping[str, Tensor]) -> None:
        if dense.dtype != torch.float32 or dense.dim() != 2 or dense.shape[1] != self.num_dense:
            raise ValueError(
                f"dense must be [batch, {self.num_dense}] float32, got {list(dense.shape)} {dense.dtype}."
            )
        if dense.isnan().any():
            row = int(dense.isnan().any(1).nonzero()[0])
            raise ValueError(f"dense is NaN in sample {row}. Give a number for each value.")
        for given in (values, lengths):
            missing = [feature for feature in self.features if feature not in given]
            unknown = [feature for feature in given if feature not in self.features]
            if missing or unknown:
                raise ValueError(
                    f"the features must be {self.features}; missing {missing}, unknown {unknown}."
                )
        for feature in self.features:
            _check_jagged(feature, values[feature], lengths[feature], len(dense))


def mapped(path: Path, records: Sequence[WeightRecord]) -> list[Tensor]:
    """The tensors of a file, in its pages; a page that is written to becomes this process's own."""
    num_bytes = path.stat().st_size
    if not num_bytes:
        return []
    memory = torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)
    found = []
    for record in records:
        dtype = getattr(torch, record.dtype)
        size = dtype.itemsize
        for dim in record.shape:
            size *= dim
        if record.offset + size > num_bytes:
            raise PackageError(f"{path} is too short for {record.name!r}. Export the model again.")
        found.append(memory[record.offset : record.offset + size].view(dtype).view(record.shape))
    return found


def _flat(
    weights: list[Tensor], dense: Tensor, values: list[Tensor], lengths: list[Tensor]
) -> Iterator[Tensor]:
    yield from weights
    yield dense
    yield from values
    yield from lengths


def _check_jagged(feature: str, values: Tensor, lengths: Tensor, batch: int) -> None:
    for what, tensor in (("ids", values), ("lengths", lengths)):
        if tensor.dtype != torch.int64 or tensor.dim() != 1:
            raise ValueError(
                f"feature {feature!r}: {what} must be a vector of int64, "
                f"got {list(tensor.shape)} {tensor.dtype}."
            )
    if len(lengths) != batch:
        raise ValueError(
            f"feature {feature!r}: {len(lengths)} lengths for {batch} samples; give one for each."
        )
    if len(lengths) and int(lengths.min()) < 0:
        raise ValueError(f"feature {feature!r}: a length is {int(lengths.min())}; it must be 0 or more.")
    if int(lengths.sum()) != len(values):
        raise ValueError(
            f"feature {feature!r}: the lengths sum to {int(lengths.sum())}, but there are {len(values)} ids; "
            "give as many ids as the lengths say."
        )


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PackageError(
            f"{folder} is no package: {path} cannot be read ({error}). Export a model."
        ) from error
    if manifest.get("format") != FORMAT:
        raise PackageError(
            f"{folder} is of format {manifest.get('format')}, this version reads {FORMAT}. Export it again."
        )
    return manifest


def _why_not_compiled(manifest: Mapping[str, Any]) -> str | None:
    version = torch.__version__.split("+")[0]
    if not manifest["compiled"]:
        return "the package holds no compiled one"
    if manifest["torch"] != version:
        return f"the compiled one is for torch {manifest['torch']} and this is {version}"
    if manifest["operators"] != operators():
        return "the compiled one calls other versions of the operators"
    if manifest["isa"] != isa():
        return f"the compiled one is for {manifest['isa']} and this machine has {isa()}"
    return None
