"""Write packages. A package is a folder from which C++ or Python serves a model without the training code.

It has a program compiled by AOTInductor, the same program as written by torch.export, and a weights file.
``manifest.json`` describes the content and how it was built. C++ reads a part from ``layout.txt``::

    meshrec-package 2
    torch 2.13.0                               the version that compiled the program
    isa AVX512                                 the instruction set that the program needs
    dense 13                                   number of dense input columns
    feature user                               a line per feature, in order
    weight float32 2 1000 64 4096 t.weight     dtype, number of dimensions, shape, offset in weights.bin, name

``digests.txt`` has size and checksums for every file (`meshrec.durable`). A package is written to a scratch
folder, which is renamed at the end, so a folder with a manifest is complete.
"""

import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshrec.data.raw_values import DENSE, RawValues
from meshrec.durable import durable_folder, sha256_of, write_digests
from meshrec.export.archive import isa, load_exported, operators
from meshrec.export.manifest import (
    ALIGNMENT,
    COMPILED,
    DTYPES,
    EXPORTED,
    FORMAT,
    INTERFACE,
    LAYOUT,
    MANIFEST,
    SHARED,
    SHARED_EXPORTED,
    WEIGHTS,
    WeightRecord,
    check_package,
    interface_of,
    layout_of,
)
from meshrec.export.next_items import RankedItems
from meshrec.export.program import Program, example_inputs, export_program
from meshrec.export.signing import read_private_key, sign_package
from meshrec.export.torchscript import write_torchscript
from meshrec.export.weights import Weights
from meshrec.export.whole_tables import with_served_tables, with_whole_tables
from meshrec.modules.embedding_configs import BaseEmbeddingConfig, BoundsCheckMode
from meshrec.modules.embedding_modules import TableCollection
from meshrec.modules.served_table import ServedRows, unknown_row_init
from meshrec.modules.table_lookup import storage_of
from meshrec.tables.hashed.table import is_growable

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_log = logging.getLogger(__name__)

TORCHSCRIPT = "torchscript.pt"
"""Package file with the program and weights as TorchScript, written on request."""
# Bytes per write, which bound the copy of a weight in memory.
_BLOCK = 1 << 24


def export(
    model: nn.Module,
    folder: str | Path,
    *,
    features: Sequence[str],
    num_dense: int,
    scores: Callable[[Tensor], Tensor] | None = torch.sigmoid,
    shared: Sequence[str] = (),
    raw: RawValues | None = None,
    items: RankedItems | None = None,
    rounding: str | None = None,
    about: Mapping[str, Any] | None = None,
    compile: bool = True,
    torchscript: bool = False,
    sign: str | Path | None = None,
) -> Path:
    """Write a package from a model that returns a score, or a vector, per sample.

    Weights are written without a second copy in memory. Tables may be quantized.

    Args:
        model: called as ``model(dense [B, num_dense], sparse)``; returns logits, [B] or [B, 1]. In evaluation
            mode it must be a pure function supported by torch.export. Tables sharded in this
            process, also over several devices, are merged.
        folder: package folder to create.
        features: keys of ``sparse``, in the order in which requests have them.
        num_dense: number of columns in the dense input.
        scores: function from logits [B] to scores; by default probabilities. None: the model returns vectors
            [B, V], like the tower of a two-tower model, and so does the package.
        shared: user features (or "dense") that all samples in a request may share. The package gets a second
            program, which looks them up once per request. Scores are the same as with repeated features.
        raw: converts raw values to IDs and dense values, so requests may contain raw values.
        items: items to recommend by the model's vectors, so servers answer ``/recommend``.
        rounding: rounding for quantized tables (`meshrec.quant.Rounding`). Servers apply it to later updates
            of rows, too.
        about: information about the weights to store in the manifest, such as run and step.
        compile: whether to compile the program for this machine, which needs a C++ compiler. Without a
            compiled program, Python serves the package.
        torchscript: whether to write ``torchscript.pt`` as well, with weights; see `write_torchscript`.
        sign: PEM file with the ed25519 private key to sign with; None: no signature.

    Returns:
        The package folder.

    Raises:
        ValueError: the folder exists, a feature is missing, the model has several outputs, a weight
            dtype is not supported, torch.export does not support the model, or the key is invalid.
        ModuleNotFoundError: a key is given, but the cryptography package is missing.
    """
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder} exists already. Name another folder, or remove it.")
    key = None if sign is None else read_private_key(sign)
    # `real` has the actual tensors for hashed tables. The model only has small examples for tracing.
    model, real = with_served_tables(with_whole_tables(model))
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    contents = {**state, **real}
    _check_arguments(state, features, num_dense, shared, raw)
    # The weights in argument order, which programs, manifest and weights.bin share.
    records = _assign_offsets(contents)
    manifest = {
        "features": list(features),
        "num_dense": num_dense,
        "outputs": "vectors" if scores is None else "scores",
        "shared": sorted(shared),
        "rows": {feature: num for feature, num in rows_of(model).items() if feature in features},
        "weights": [record._asdict() for record in records],
        "quantised": {
            name: str(config.data_type) for name, config in _named_configs(model) if config.data_type.bits
        },
        "rounding": rounding,
        "about": dict(about or {}),
    }
    if hashed := _hashed_parameters(model):
        manifest["hashed"] = hashed
        manifest["any_ids"] = [
            feature for feature in features if feature in _features_of_hashed_tables(model)
        ]
    with durable_folder(folder) as parts:
        # Dropout and batch normalization must be exported in evaluation mode.
        was_training = model.training
        model.eval()
        try:
            kinds = [(COMPILED, EXPORTED, ())] + (
                [(SHARED, SHARED_EXPORTED, tuple(shared))] if shared else []
            )
            # Why not all programs are compiled; None: they are.
            why_not = None if compile else "compile=False"
            # The second program, if there is one, takes the shared inputs once for many samples.
            for compiled_name, exported_name, given_once in kinds:
                program = Program(model, list(state), features, scores, given_once)
                exported_program = _export_program(
                    program,
                    model,
                    [t.detach() for t in state.values()],
                    features,
                    num_dense=num_dense,
                    shared=given_once,
                    growing=[name in real for name in state],
                )
                if why_not is None:
                    why_not = compile_program(exported_program, parts / compiled_name)
                exported_program._example_inputs = None  # they include the weights
                torch.export.save(
                    exported_program, parts / exported_name, extra_files={INTERFACE: interface_of(manifest)}
                )
                if torchscript and not given_once:
                    write_torchscript(exported_program, _to_tensors(contents), parts / TORCHSCRIPT)
        finally:
            model.train(was_training)
        if why_not is not None:
            _log.warning("the package %s has no compiled program (%s): Python serves it", folder, why_not)
        if raw is not None:
            raw.save(parts)
        if items is not None:
            items.save(parts)
        _write_weights(parts / WEIGHTS, contents, records)
        # Last, because the manifest has the digests of all other files.
        write_manifest_and_signature(parts, {**manifest, "compiled": why_not is None}, key)
    return folder


def compile_anew(
    package: str | Path,
    folder: str | Path,
    *,
    sign: str | Path | None = None,
    public_key: str | Path | None = None,
) -> Path:
    """Create a package from another package, with the program compiled for this machine and torch version.

    Weights are hard-linked if both packages are on the same file system, otherwise copied.

    Args:
        package: existing package, which does not change.
        folder: package folder to create.
        sign: PEM file with the ed25519 private key to sign the new package with; None: no signature.
        public_key: PEM file with an ed25519 public key. ``package`` must be signed with the matching private
            key. None: no signature is needed.

    Returns:
        The new folder.

    Raises:
        PackageError: the package is damaged or not signed by the key, or the program needs another version.
        ValueError: the folder exists, the program cannot be compiled here, or a key is invalid.
        ModuleNotFoundError: a key is given, but the cryptography package is missing.
    """
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder} exists already. Name another folder, or remove it.")
    key = None if sign is None else read_private_key(sign)
    # Checked before anything is loaded, because loading a program executes code.
    package, manifest, _, _ = check_package(package, public_key=public_key)
    weights = Weights(package / WEIGHTS, [WeightRecord(**record) for record in manifest["weights"]]).tensors
    with durable_folder(folder) as parts:
        for name in manifest["sha256"]:
            # Compiled programs and the layout depend on the machine and are written again.
            if name not in (COMPILED, SHARED, LAYOUT):
                link(package / name, parts / name)
        for compiled_name, exported_name in ((COMPILED, EXPORTED), (SHARED, SHARED_EXPORTED)):
            if (package / exported_name).is_file():
                exported_program = load_exported(package / exported_name)
                shared = manifest["shared"] if exported_name == SHARED_EXPORTED else []
                inputs = example_inputs(weights, manifest["num_dense"], manifest["features"], shared)
                # The compiler needs example inputs, which `export` does not save.
                exported_program._example_inputs = inputs, {}
                why_not = compile_program(exported_program, parts / compiled_name)
                if why_not is not None:
                    raise ValueError(f"{package} cannot be compiled here: {why_not}. Serve it from Python.")
        write_manifest_and_signature(parts, {**manifest, "compiled": True}, key)
    return folder


def compile_program(export_program: "torch.export.ExportedProgram", target: Path) -> str | None:
    """Compile an exported program for this machine with AOTInductor.

    Args:
        export_program: program with example inputs.
        target: file to write.

    Returns:
        None if the program was compiled, otherwise the reason why that is not possible here.
    """
    why_not = why_not_compiled()
    if why_not is not None:
        return why_not
    with warnings.catch_warnings():
        # Inductor uses a deprecated tree spec class.
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        torch._inductor.aoti_compile_and_package(export_program, package_path=str(target))
    return None


def why_not_compiled() -> str | None:
    """Return the reason why `compile_program` compiles no program here, or None if it does."""
    # Programs that torch 2.10 compiles pass wrong tensors to custom operators, and those of 2.12 ignore an
    # error of an operator and go on with an undefined tensor. 2.13 to 2.15 are tested.
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        return f"torch {torch.__version__} compiles custom operators wrongly; install torch 2.13 or later"
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        return f"no C++ compiler: {compiler!r} is not installed; set CXX"
    if " " in torch.__file__:  # inductor splits compiler commands at spaces
        return f"torch cannot compile from a folder with a space in its path: {Path(torch.__file__).parent}"
    return None


def rows_of(model: nn.Module) -> dict[str, int]:
    """Return the exclusive upper limit for IDs, by feature.

    Features without a limit are left out. All their tables are hashed, or do not raise an error for an
    invalid ID.
    """
    limits: dict[str, int] = {}
    for child in model.modules():
        if isinstance(child, TableCollection) and child.bounds_check is BoundsCheckMode.ERROR:
            for config, _ in child.tables().values():
                if config.keys is not None:  # hashed: every ID is valid
                    continue
                for feature in config.feature_names:
                    # Several tables may look up the feature, so the smallest decides.
                    limits[feature] = min(config.num_embeddings, limits.get(feature, config.num_embeddings))
    return limits


def _features_of_hashed_tables(model: nn.Module) -> set[str]:
    """Return the features which only hashed tables look up. Every int64 is a valid ID for them."""
    readers: dict[str, list[bool]] = {}
    for _, config in _named_configs(model):
        for feature in config.feature_names:
            readers.setdefault(feature, []).append(config.keys is not None)
    return {feature for feature, hashed in readers.items() if all(hashed)}


def _check_arguments(
    state: Mapping[str, Tensor],
    features: Sequence[str],
    num_dense: int,
    shared: Sequence[str],
    raw: RawValues | None,
) -> None:
    """Check arguments of `export` against the weights and the inputs of the model."""
    for name, tensor in state.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{name} is {tensor.dtype}; packages support {', '.join(DTYPES.values())}. Convert it first."
            )
    inputs = [*features, *([DENSE] if num_dense else [])]
    unknown = [name for name in shared if name not in inputs]
    # If all inputs were shared, the samples of a group would not differ.
    if unknown or (shared and set(inputs) <= set(shared)):
        raise ValueError(
            f"shared must name some of {inputs}, not all of them, got {list(shared)}. "
            "Name what belongs to the user."
        )
    if raw is not None and (raw.keys != list(features) or raw.num_dense != num_dense):
        raise ValueError(
            f"the raw values have features {raw.keys} and {raw.num_dense} dense values, but the model reads "
            f"{list(features)} and {num_dense}. Pass the features used in training."
        )


def _hashed_parameters(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what servers need to look up IDs in hashed tables, by weight name.

    The parameters give the key of an ID, and the initial row of an ID which the table does not have.
    """
    formulas = {}
    for name, config in _named_configs(model):
        storage = storage_of(config)
        if is_growable(storage):
            first = unknown_row_init(storage)
            formulas[name] = {
                "seed": storage.keys.seed,
                "max_rows": storage.max_rows,
                "dim": storage.dim,
                "first_seed": first.seed,
                "low": first.low,
                "high": first.high,
            }
    return formulas


def _named_configs(model: nn.Module) -> Iterator[tuple[str, BaseEmbeddingConfig]]:
    """Yield the weight name and the config of every table."""
    for path, child in model.named_modules():
        if isinstance(child, TableCollection):
            for name, (config, _) in child.tables().items():
                yield f"{path}.{name}" if path else name, config


def _export_program(
    program: Program,
    model: nn.Module,
    weights: list[Tensor],
    features: Sequence[str],
    *,
    num_dense: int,
    shared: Sequence[str],
    growing: Sequence[bool],
) -> "torch.export.ExportedProgram":
    """Export a program with torch.export, with an error message which names the model and the features.

    Args:
        growing: for every weight, whether the row count may change later.
    """
    try:
        return export_program(program, weights, features, num_dense, shared, growing=growing)
    except Exception as error:
        several = f" with the shared features {list(shared)}" if shared else ""
        raise ValueError(
            f"{type(model).__name__} cannot be exported{several}: {error}. Its forward must be one "
            f"which torch.export supports. Pass the features it reads (given: {list(features)})."
        ) from error


def link(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it if ``target`` is on another file system."""
    try:
        # Weights may be many GiB, and packages never change.
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _to_tensors(contents: Mapping[str, Tensor | ServedRows]) -> dict[str, Tensor]:
    """Return all weights as tensors. Rows of hashed tables, which are read in blocks, are concatenated."""
    return {
        name: content if isinstance(content, Tensor) else torch.cat([content.empty(), *content.blocks()])
        for name, content in contents.items()
    }


def _assign_offsets(state: Mapping[str, Tensor | ServedRows]) -> list[WeightRecord]:
    """Return a record per tensor, with consecutive aligned offsets in ``weights.bin``."""
    records, end = [], 0
    for name, tensor in state.items():
        record = WeightRecord(name, DTYPES[tensor.dtype], list(tensor.shape), end + -end % ALIGNMENT)
        records.append(record)
        end = record.offset + record.num_bytes
    return records


def _write_weights(
    path: Path, state: Mapping[str, Tensor | ServedRows], records: Sequence[WeightRecord]
) -> None:
    """Write all tensors at their offsets, with zeros between them and up to the end of the last page."""
    with path.open("wb") as file:
        for content, record in zip(state.values(), records, strict=True):
            file.write(b"\0" * (record.offset - file.tell()))
            for tensor in [content] if isinstance(content, Tensor) else content.blocks():
                if tensor.numel():
                    flat = tensor.detach().cpu().reshape(-1).view(torch.uint8)
                    # `tobytes` copies, so a block at a time bounds the memory.
                    for block in flat.split(_BLOCK):
                        file.write(block.numpy().tobytes())
        file.write(b"\0" * (-file.tell() % ALIGNMENT))


def write_manifest_and_signature(
    parts: Path, manifest: Mapping[str, Any], key: "Ed25519PrivateKey | None" = None
) -> None:
    """Write the last files of a package: layout, manifest, digests and signature.

    Args:
        parts: folder with all other files.
        manifest: manifest fields which describe the model. Fields about the machine are added here.
        key: private key to sign with; None: no signature.
    """
    built_with = {
        "format": FORMAT,
        "torch": torch.__version__.split("+")[0],
        "isa": isa(),
        "operators": operators(),
    }
    manifest = {**manifest, **built_with}
    # The manifest lists the layout's SHA-256, the digests cover the manifest, and the signature covers both.
    (parts / LAYOUT).write_text(layout_of(manifest))
    files = {path.name: sha256_of(path) for path in sorted(parts.iterdir())}
    with (parts / MANIFEST).open("w") as file:
        json.dump({**manifest, "sha256": files}, file, indent=1)
    write_digests(parts, sha256s=files)
    if key is not None:
        sign_package(parts, key)
