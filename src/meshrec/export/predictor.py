"""Compute the scores of a package in Python.

The compiled program is used if it runs on this machine, otherwise the slower exported program.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import meshrec.ops.tbe.naive  # noqa: F401 - the operators must exist
from meshrec.data.raw_values import DENSE, FITTED, RawValues
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
from meshrec.export.weights import Weights
from meshrec.models import AdvancedHistories, TokenCache
from meshrec.ops.operators import InputError, translate_error

_log = logging.getLogger(__name__)

# B samples, R shared rows, N IDs, V vector width

# Takes the weights in manifest order, dense values, values and lengths per feature, and for shared features
# the group; returns scores or vectors.
_Program = Callable[..., Tensor]


class Predictor:
    """Model in an exported package: computes scores or vectors for batches of samples. Thread-safe.

    Processes that open the same package share the memory for weights, unless these are copied.

    Args:
        package: folder written by `meshrec.export.export`, or a result from `check_package`, which is not
            verified again.
        verify: whether to read all files and compare checksums first. If False, loading takes
            milliseconds, but a damaged file gives wrong scores or a crash.
        public_key: PEM file with an ed25519 public key. The package must be signed with the matching private
            key. None: no signature is needed.
        copy_weights: whether to copy weights to memory instead of mapping the file, so later changes to
            the file have no effect.
        larger_than_memory: whether weights are larger than memory, so that lookups should request all rows
            from the disk before they read the first. None: compare the file size with this process's memory
            limit.

    Attributes:
        folder: package folder.
        features: features required in a request.
        num_dense: number of dense columns required in a request.
        outputs: ``scores``, or ``vectors`` from a tower.
        shared: features (or "dense") that samples in a request may share; see `__call__`.
        rows: exclusive upper limit for IDs by feature, for features whose tables raise for invalid IDs.
        version: digest of the package content, 12 hexadecimal digits.
        weights: weights by name. Writes to these tensors affect later scores, but never the package files.
        any_ids: features for which every int64 is a valid ID, because only hashed tables read them.
        hashed: for hashed tables, by weight name, the parameters for keys and for initial rows of unseen IDs.
        is_compiled: whether the compiled program is used. If not, the log says why.
        quantised: data type of every quantized weight, by weight name.
        rounding: rounding for quantized weights.
        about: information about the weights from the export, such as run and step.

    Raises:
        PackageError: the package is damaged, has another format, is not signed by the key, or was replaced
            while it was read.
        ValueError: the key cannot be read, or is given together with ``verify=False``.
        ModuleNotFoundError: a key is given, but the cryptography package is missing.
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
            _log.warning("%s: using the exported program, because %s", self.folder, reason)
        # Checked again below, because the files are opened after the manifest was verified.
        self._program = self._load(COMPILED, EXPORTED)
        self._shared_program = self._load(SHARED, SHARED_EXPORTED) if self.shared else None
        self._check_same()

    @functools.cached_property
    def raw(self) -> RawValues | None:
        """Conversion from raw values to IDs and dense values; None if the package does not have it."""
        # Read at first use, so the package may have been replaced since the manifest was read.
        raw = RawValues.load(self.folder) if FITTED in self._manifest["sha256"] else None
        self._check_same()
        return raw

    @functools.cached_property
    def items(self) -> RankedItems | None:
        """Items recommended by the package; None if it has no items."""
        items = RankedItems.load(self.folder) if ITEMS in self._manifest["sha256"] else None
        self._check_same()
        return items

    @functools.cached_property
    def incremental(self) -> IncrementalQueries | None:
        """Encoder for new items in a history, given a KV cache; None if the model does not support it.

        It runs in Python. The compiled program, also in C++, always encodes whole histories.
        """
        items = self.items
        if items is None or items.encoder is None:
            return None
        return IncrementalQueries(items.encoder, self.weights, normalise=items.normalise)

    def advance(self, values: list[Tensor], lengths: list[Tensor], cache: TokenCache) -> AdvancedHistories:
        """Compute the query vectors of histories, encoding only the items that are not cached.

        See `IncrementalQueries`. The property `incremental` must not be None.

        Args:
            values: for every feature in ``incremental.features``, the values [N] of the whole histories.
            lengths: for every such feature, the number of values per history, int64 [B].
            cache: keys and values for the first items in every history.

        Raises:
            ValueError: a history is too long, or an ID is outside the table.
            PackageError: the weights file was truncated.
        """
        assert self.incremental is not None
        advanced = self.incremental(values, lengths, cache)
        self._weights.check()
        return advanced

    def _check_same(self) -> None:
        """Raise PackageError if the package has been replaced since the manifest was read."""
        # An unreadable manifest also means that the package was replaced.
        with contextlib.suppress(PackageError):
            if read_manifest(self.folder) == self._manifest:
                return
        raise PackageError(f"{self.folder} was replaced while it was read. Load it again.")

    def _load(self, compiled: str, exported: str) -> _Program:
        """Load the compiled program if `is_compiled`, otherwise the exported program.

        Returns:
            Function that takes the program's inputs and returns the scores or vectors.
        """
        if not self.is_compiled:
            return load_exported(self.folder / exported).module()
        loader = load_compiled(self.folder / compiled)
        return lambda *inputs: loader.boxed_run(list(_flatten(inputs)))[0]

    def check_weights(self) -> None:
        """Check that the weights file has not changed since it was mapped.

        Takes a microsecond if the size and modification time are the same. Otherwise the file is verified
        again.

        Raises:
            PackageError: the file was truncated or changed, so scores may be wrong.
        """
        self._weights.check_changes()

    def __call__(
        self,
        dense: Tensor,
        values: Mapping[str, Tensor],
        lengths: Mapping[str, Tensor],
        *,
        group: Tensor | None = None,
    ) -> Tensor:
        """Compute the scores or vectors of B samples. Checks the inputs.

        Args:
            dense: dense values, float32 [B, num_dense].
            values: IDs by feature, int64 [N], sample by sample.
            lengths: number of IDs per sample by feature, int64 [B].
            group: if samples share features, such as the candidates for one user: the index of every sample's
                shared row, int64 [B], in [0, R). Lengths of ``shared`` features are then [R] instead of [B],
                and dense is [R, num_dense] if it is shared. None: samples share nothing.

        Returns:
            Scores [B], or vectors [B, V], float32.

        Raises:
            ValueError: a feature is missing, a shape or dtype is wrong, lengths do not sum to the ID count, a
                value is NaN or infinite, an ID is outside the table, or ``group`` is given but the
                package has no shared features.
            PackageError: the weights file was truncated.
        """
        self._check(dense, values, lengths, group)
        values_F, lengths_F = ([given[name] for name in self.features] for given in (values, lengths))
        return self.run(dense, values_F, lengths_F, group)

    @torch.inference_mode()
    def run(
        self, dense: Tensor, values: list[Tensor], lengths: list[Tensor], group: Tensor | None = None
    ) -> Tensor:
        """Compute scores or vectors without checking shapes and dtypes, for callers which have checked them.

        Args:
            dense: dense values, float32 [B, num_dense].
            values: for every feature in ``features``, the IDs, int64 [N], sample by sample.
            lengths: for every feature in ``features``, the number of IDs per sample, int64 [B].
            group: see `__call__`.

        Returns:
            Scores [B], or vectors [B, V], float32.

        Raises:
            ValueError: an ID is outside the table.
            PackageError: the weights file was truncated.
        """
        weights = list(self.weights.values())
        try:
            if group is None:
                scores = self._program(weights, dense, values, lengths)
            else:
                # The caller has checked that the package has shared features.
                assert self._shared_program is not None
                scores = self._shared_program(weights, dense, values, lengths, group)
        except (ValueError, RuntimeError) as error:
            cause = translate_error(error)
            if not isinstance(cause, InputError):
                raise
            # The first line is the operator's message; compiled programs append the call site.
            raise InputError(str(cause).partition("\n")[0]) from error
        # Checked after the computation, because scores from lost pages are wrong.
        self._weights.check()
        return scores

    def _check(
        self,
        dense: Tensor,
        values: Mapping[str, Tensor],
        lengths: Mapping[str, Tensor],
        group: Tensor | None,
    ) -> None:
        """Raise ValueError if a feature is missing, or an input has an invalid shape, dtype or value."""
        if group is not None and not self.shared:
            raise ValueError(
                f"{self.folder} has no shared features, but a group was given. Export with shared=[...], or "
                "repeat the features per sample."
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
        # With a group, dense may have a row per shared row instead of per sample.
        num_samples = len(dense) if group is None else len(group)
        num_shared = num_samples if group is None else self._check_group(group, dense, lengths)
        for feature in self.features:
            batch = num_shared if feature in self.shared else num_samples
            _check_jagged(feature, values[feature], lengths[feature], batch)

    def _check_group(self, group: Tensor, dense: Tensor, lengths: Mapping[str, Tensor]) -> int:
        """Check ``group``, and return the number of shared rows R."""
        # Any shared feature will do, because `_check` compares the number of rows of the others with it.
        num_rows = len(dense) if DENSE in self.shared else len(lengths[min(self.shared)])
        if group.dtype != torch.int64 or group.dim() != 1:
            raise ValueError(f"group must be [batch] int64, got {list(group.shape)} {group.dtype}.")
        if len(group) and not 0 <= int(group.min()) <= int(group.max()) < num_rows:
            raise ValueError(
                f"group has rows from {int(group.min())} to {int(group.max())}, but {num_rows} are given. "
                "Number shared rows from 0."
            )
        if DENSE not in self.shared and len(dense) != len(group):
            raise ValueError(f"dense has {len(dense)} rows for {len(group)} samples; give one per sample.")
        return num_rows


def _flatten(inputs: Iterable[Any]) -> Iterator[Tensor]:
    """Yield all tensors one by one. An item of ``inputs`` is a tensor or a list of tensors."""
    for item in inputs:
        if isinstance(item, Tensor):
            yield item
        else:
            yield from item


def _check_jagged(feature: str, values: Tensor, lengths: Tensor, batch: int) -> None:
    """Raise ValueError unless a feature has int64 IDs, and `batch` lengths which sum to the number of IDs."""
    for part, tensor in (("ids", values), ("lengths", lengths)):
        if tensor.dtype != torch.int64 or tensor.dim() != 1:
            raise ValueError(
                f"feature {feature!r}: {part} must be a vector of int64, "
                f"got {list(tensor.shape)} {tensor.dtype}."
            )
    if len(lengths) != batch:
        raise ValueError(
            f"feature {feature!r}: {len(lengths)} lengths for {batch} samples; give one per sample."
        )
    if len(lengths) and int(lengths.min()) < 0:
        raise ValueError(f"feature {feature!r}: a length is {int(lengths.min())}; it must be 0 or more.")
    if int(lengths.sum()) != len(values):
        raise ValueError(
            f"feature {feature!r}: the lengths sum to {int(lengths.sum())}, but there are {len(values)} ids; "
            "give as many ids as the lengths say."
        )


def _why_not_compiled(manifest: Mapping[str, Any]) -> str | None:
    """Return why this process cannot use a package's compiled program; None if it can."""
    version = torch.__version__.split("+")[0]
    if not manifest["compiled"]:
        return "the package has no compiled program"
    if manifest["torch"] != version:
        return f"the compiled program is for torch {manifest['torch']}, but this is {version}"
    if manifest["operators"] != operators():
        return "the compiled program calls other operator versions"
    if manifest["isa"] != isa():
        return f"the compiled program is for {manifest['isa']}, but this machine has {isa()}"
    return None
