"""A package served from Python: the compiled program, or the exported one where that does not fit."""

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import meshrec.ops.tbe.naive  # noqa: F401 - the operators must exist
from meshrec.export.archive import PackageError, isa, load_compiled, load_exported, operators
from meshrec.export.incremental import IncrementalQueries
from meshrec.export.manifest import (
    COMPILED,
    EXPORTED,
    SHARED,
    SHARED_EXPORTED,
    WEIGHTS,
    CheckedPackage,
    WeightRecord,
    check_package,
    read_manifest,
)
from meshrec.export.next_items import ITEMS, RankedItems
from meshrec.export.program import DENSE
from meshrec.export.raw_values import FITTED, RawValues
from meshrec.export.weights import Weights
from meshrec.models import AdvancedHistories, KeptTokens

_log = logging.getLogger(__name__)

# B samples, R rows that samples share, N ids, V width of vectors

_Program = Callable[..., Tensor]


class Predictor:
    """The scores (or vectors) of a package's model. Its weights are mapped: processes share them.

    Safe to call from several threads.

    Args:
        package: the folder that `meshrec.export.export` wrote, or what `check_package` returned, which is not
            checked again.
        verify: compare every file with its checksum before any of it is used, which reads all of them. With
            False, loading takes milliseconds, and a damaged file gives wrong scores or ends the process.
        public_key: PEM file of the ed25519 public key that must have signed the package.
        copy_weights: copy the weights into memory of this process instead of mapping the file. What happens
            to the file afterwards does not matter then.
        larger_than_memory: whether the weights do not fit into memory, so that lookups should request all
            their rows from the disk before they read the first. None: compare the file with the memory that
            this process may use.

    Attributes:
        folder: the package.
        features, num_dense: what a request must have.
        outputs: ``scores``, or ``vectors`` of a tower.
        shared: features (or "dense") that samples may have in common.
        rows: rows of the table of each feature; a feature without tables that check ids is not in it.
        version: tells packages apart: a digest of all that is in it.
        weights: by name. Writing to them, or replacing one, changes the scores of this predictor, and never
            the package.
        any_ids: features of which every int64 is an ID: those that hashed tables alone read.
        hashed: the formulas of keys and first rows of hashed tables, by the name of the weight.
        is_compiled: whether the compiled program serves; otherwise a log line says why not.
        quantised: the data types of quantised weights, by name, and ``rounding`` how they were rounded.
        about: what the exporter wrote down.

    Raises:
        PackageError: the folder is not a package, is damaged or of a newer format, is not signed by the key,
            or is replaced while it is read.
        ValueError: the key cannot be read, or is given together with ``verify=False``.
        ModuleNotFoundError: a key is given, and the package cryptography is missing.
    """

    def __init__(
        self,
        package: str | Path | CheckedPackage,
        *,
        verify: bool = True,
        public_key: str | Path | None = None,
        copy_weights: bool = False,
        larger_than_memory: bool | None = None,
    ) -> None:
        if not isinstance(package, CheckedPackage):
            package = check_package(package, verify=verify, public_key=public_key)
        self.folder, self._manifest, self.version, digest = package
        manifest = self._manifest
        self.features: list[str] = manifest["features"]
        self.num_dense: int = manifest["num_dense"]
        self.outputs: Literal["scores", "vectors"] = manifest["outputs"]
        self.shared = frozenset[str](manifest["shared"])
        self.rows: dict[str, int] = manifest["rows"]
        self.quantised: dict[str, str] = manifest["quantised"]
        self.rounding: str | None = manifest["rounding"]
        self.any_ids = frozenset[str](manifest.get("any_ids", ()))
        self.hashed: dict[str, dict[str, Any]] = manifest.get("hashed", {})
        self.about: dict[str, Any] = manifest["about"]
        records = [WeightRecord(**record) for record in manifest["weights"]]
        self._weights = Weights(
            self.folder / WEIGHTS,
            records,
            private=copy_weights,
            larger_than_memory=larger_than_memory,
            digest=digest,
        )
        self.weights = {r.name: w for r, w in zip(records, self._weights.tensors, strict=True)}
        reason = _why_not_compiled(manifest)
        self.is_compiled = reason is None
        if reason is not None:
            _log.warning("%s: the exported program serves, as %s", self.folder, reason)
        self._program = self._load(COMPILED, EXPORTED)
        self._shared_program = self._load(SHARED, SHARED_EXPORTED) if self.shared else None
        self._check_same()

    @functools.cached_property
    def raw(self) -> RawValues | None:
        """The conversion of raw values to ids and dense values; None if the package has none."""
        found = RawValues.load(self.folder) if FITTED in self._manifest["sha256"] else None
        self._check_same()
        return found

    @functools.cached_property
    def items(self) -> RankedItems | None:
        """The items that the package recommends; None if it recommends none."""
        found = RankedItems.load(self.folder) if ITEMS in self._manifest["sha256"] else None
        self._check_same()
        return found

    @functools.cached_property
    def incremental(self) -> IncrementalQueries | None:
        """The queries of histories from kept keys and values; None if the package's model keeps none.

        Python computes them. The compiled program, and so C++, always encodes whole histories.
        """
        items = self.items
        if items is None or items.encoder is None:
            return None
        return IncrementalQueries(items.encoder, self.weights, normalise=items.normalise)

    def advance(self, values: list[Tensor], lengths: list[Tensor], kept: KeptTokens) -> AdvancedHistories:
        """Return the queries of histories from what is kept of their beginnings; see `IncrementalQueries`.

        Raises:
            ValueError: a history is too long, or an ID lies outside its table.
            PackageError: the file of the weights was cut short meanwhile.
        """
        assert self.incremental is not None
        found = self.incremental(values, lengths, kept)
        self._weights.check()
        return found

    def _check_same(self) -> None:
        with contextlib.suppress(PackageError):
            if read_manifest(self.folder) == self._manifest:
                return
        raise PackageError(f"{self.folder} became another package while it was read. Load it again.")

    def _load(self, compiled: str, exported: str) -> _Program:
        if not self.is_compiled:
            return load_exported(self.folder / exported).module()
        loader = load_compiled(self.folder / compiled)
        return lambda *inputs: loader.boxed_run(list(_flat(inputs)))[0]

    def check_weights(self) -> None:
        """Check that the file of the weights has not changed since it was mapped.

        Takes a microsecond if nothing wrote to it, and otherwise as long as comparing it with its checksums.

        Raises:
            PackageError: the file was cut short, or holds something else by now: scores may be wrong.
        """
        self._weights.look_again()

    def __call__(
        self,
        dense: Tensor,
        values: Mapping[str, Tensor],
        lengths: Mapping[str, Tensor],
        *,
        group: Tensor | None = None,
    ) -> Tensor:
        """Compute scores [B] float32, or vectors [B, V].

        Args:
            dense: [B, num_dense] float32.
            values: per feature ids [N] int64, those of the first sample first.
            lengths: per feature [B] int64, ids of each sample.
            group: [B] int64, for samples that share features: each sample's row of the shared values. Lengths
                of ``shared`` features are then [R], and so is dense ([R, num_dense]) if it is shared.

        Raises:
            ValueError: a feature is missing, shapes or dtypes are wrong, lengths do not sum to the number of
                ids, a value is NaN or infinite, an id lies outside its table, or there is a group and the
                package shares nothing.
            PackageError: the file of the weights was cut short meanwhile.
        """
        self._check(dense, values, lengths, group)
        values_F, lengths_F = ([given[name] for name in self.features] for given in (values, lengths))
        return self.run(dense, values_F, lengths_F, group)

    @torch.inference_mode()
    def run(
        self, dense: Tensor, values: list[Tensor], lengths: list[Tensor], group: Tensor | None = None
    ) -> Tensor:
        """Score a request that was checked, with ids and lengths in the order of ``features``.

        Raises:
            ValueError: an id lies outside its table.
            PackageError: the file of the weights was cut short meanwhile.
        """
        weights = list(self.weights.values())
        try:
            if group is None:
                scores = self._program(weights, dense, values, lengths)
            else:
                assert self._shared_program is not None
                scores = self._shared_program(weights, dense, values, lengths, group)
        except RuntimeError as error:
            # The compiled program puts the place of the call around the operator's message about ids.
            said = re.match(r"(?:ValueError: )?(table '.*)", str(error))
            if said is None:
                raise
            raise ValueError(said[1]) from error
        self._weights.check()
        return scores

    def _check(
        self,
        dense: Tensor,
        values: Mapping[str, Tensor],
        lengths: Mapping[str, Tensor],
        group: Tensor | None,
    ) -> None:
        if group is not None and not self.shared:
            raise ValueError(
                f"{self.folder} shares no features, and a group was given. Export with shared=[...], or "
                "repeat them for each sample."
            )
        if dense.dtype != torch.float32 or dense.dim() != 2 or dense.shape[1] != self.num_dense:
            raise ValueError(
                f"dense must be [batch, {self.num_dense}] float32, got {list(dense.shape)} {dense.dtype}."
            )
        finite = dense.isfinite()
        if not finite.all():
            row, column = (~finite).nonzero()[0].tolist()
            raise ValueError(
                f"dense value {column} of sample {row} is {dense[row, column]:g}. Give a finite number."
            )
        for given in (values, lengths):
            missing = [feature for feature in self.features if feature not in given]
            unknown = [feature for feature in given if feature not in self.features]
            if missing or unknown:
                raise ValueError(
                    f"the features must be {self.features}; missing {missing}, unknown {unknown}."
                )
        num_samples = len(dense) if group is None else len(group)
        num_shared = num_samples if group is None else self._check_group(group, dense, lengths)
        for feature in self.features:
            batch = num_shared if feature in self.shared else num_samples
            _check_jagged(feature, values[feature], lengths[feature], batch)

    def _check_group(self, group: Tensor, dense: Tensor, lengths: Mapping[str, Tensor]) -> int:
        """Check a group, and return the number of rows that it chooses from."""
        num_rows = len(dense) if DENSE in self.shared else len(lengths[min(self.shared)])
        if group.dtype != torch.int64 or group.dim() != 1:
            raise ValueError(f"group must be [batch] int64, got {list(group.shape)} {group.dtype}.")
        if len(group) and not 0 <= int(group.min()) <= int(group.max()) < num_rows:
            raise ValueError(
                f"group has rows from {int(group.min())} to {int(group.max())}, and {num_rows} are given. "
                "Number the rows of what is shared from 0."
            )
        if DENSE not in self.shared and len(dense) != len(group):
            raise ValueError(f"dense has {len(dense)} rows for {len(group)} samples; give one for each.")
        return num_rows


def _flat(inputs: Iterable[Any]) -> Iterator[Tensor]:
    for each in inputs:
        if isinstance(each, Tensor):
            yield each
        else:
            yield from each


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


def _why_not_compiled(manifest: Mapping[str, Any]) -> str | None:
    version = torch.__version__.split("+")[0]
    if not manifest["compiled"]:
        return "the package has no compiled one"
    if manifest["torch"] != version:
        return f"the compiled one is for torch {manifest['torch']} and this is {version}"
    if manifest["operators"] != operators():
        return "the compiled one calls other versions of the operators"
    if manifest["isa"] != isa():
        return f"the compiled one is for {manifest['isa']} and this machine has {isa()}"
    return None
