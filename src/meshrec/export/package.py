"""A package: a folder with a compiled program, the program it was compiled from, and the weights in one file.

``manifest.json`` says what the package contains and how it was made. C++ reads a part of that from
``layout.txt``:

    meshrec-package 2
    torch 2.13.0                      what the program was compiled with
    isa AVX512                        the instructions it needs
    dense 13                          columns of the dense input
    feature user                      one line for each feature, in their order
    weight float32 2 1000 64 4096 t.weight   dtype, dimensions, shape, offset in weights.bin, name

``digests.txt`` has the size and checksums of every file (`meshrec.durable`). A package is written into a
scratch folder and renamed at the end, so that a folder with a manifest is complete.
"""

import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

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
from meshrec.export.program import DENSE, Program, example_inputs, exported
from meshrec.export.raw_values import RawValues
from meshrec.export.signing import read_private_key, sign_package
from meshrec.export.torchscript import write_torchscript
from meshrec.export.weights import Weights
from meshrec.export.whole_tables import with_served_tables, with_whole_tables
from meshrec.modules.embedding_configs import BoundsCheckMode
from meshrec.modules.embedding_modules import TableCollection
from meshrec.modules.served_table import ServedRows, ServedTable, first_rows_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_log = logging.getLogger(__name__)

TORCHSCRIPT = "torchscript.pt"
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
    """Write a package of a model that gives one number for each sample, or one vector.

    The current weights are written, each once; no copy of all of them is made in memory. Tables may be
    quantised.

    Args:
        model: called as ``model(dense [B, num_dense], sparse)`` it gives logits, [B] or [B, 1]. In evaluation
            mode it must be a function of its input: what torch.export takes. Tables that are sharded in this
            process, also over several devices, are put together.
        folder: the new package, which must not exist yet.
        features: the keys of ``sparse``, in the order in which requests give them.
        num_dense: columns of the dense input.
        scores: maps logits [B] to the scores that requests get; the default gives probabilities. With None,
            the model gives vectors [B, V], as a tower does, and so does the package.
        shared: features of a user, or "dense", that many items are ranked for: a second program looks them up
            once a request. The scores are those of the same features repeated for each item.
        raw: turns raw values into ids and dense values; requests may then contain raw values.
        items: the items to recommend by the vectors that the model gives; servers then answer ``/recommend``.
        rounding: how quantised tables were rounded (`meshrec.quant.Rounding`): deltas are rounded alike.
        about: what the manifest shall say of the weights, such as their run and step.
        compile: compile the program for this machine (needs a C++ compiler); without it, or where no compiler
            is found, the package is served from Python.
        torchscript: write ``torchscript.pt`` as well, with the weights in it; see `write_torchscript`.
        sign: PEM file of the ed25519 private key to sign the package with.

    Returns: the folder.

    Raises:
        ValueError: the folder exists, the model lacks a feature or has several outputs, a weight has a dtype
            that packages do not support, torch.export does not take the model, or the key is not one.
        ModuleNotFoundError: a key is given, and the package cryptography is missing.
    """
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder} exists already. Name another folder, or remove it.")
    key = None if sign is None else read_private_key(sign)
    model, real = with_served_tables(with_whole_tables(model))
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    contents = {**state, **real}
    _check(state, features, num_dense, shared, raw)
    records = _records(contents)
    manifest = {
        "features": list(features),
        "num_dense": num_dense,
        "outputs": "vectors" if scores is None else "scores",
        "shared": sorted(shared),
        "rows": {feature: num for feature, num in rows_of(model).items() if feature in features},
        "weights": [record._asdict() for record in records],
        "quantised": _types_of(model),
        "rounding": rounding,
        "about": dict(about or {}),
    }
    if hashed := _hashed(model):
        manifest["hashed"] = hashed
        manifest["any_ids"] = [feature for feature in features if feature in _read_raw(model)]
    with durable_folder(folder) as parts:
        was_training = model.training
        model.eval()
        try:
            kinds = [(COMPILED, EXPORTED, ())] + (
                [(SHARED, SHARED_EXPORTED, tuple(shared))] if shared else []
            )
            for compiled_name, exported_name, given_once in kinds:
                program = Program(model, list(state), features, scores, given_once)
                found = _exported(
                    program,
                    model,
                    [t.detach() for t in state.values()],
                    features,
                    num_dense=num_dense,
                    shared=given_once,
                    growing=[name in real for name in state],
                )
                why_not = compile_program(found, parts / compiled_name) if compile else "compile=False"
                found._example_inputs = None  # the weights were among them
                torch.export.save(
                    found, parts / exported_name, extra_files={INTERFACE: interface_of(manifest)}
                )
                if torchscript and not given_once:
                    write_torchscript(found, _in_memory(contents), parts / TORCHSCRIPT)
        finally:
            model.train(was_training)
        if why_not is not None:
            _log.warning("the package %s holds no compiled program (%s): Python serves it", folder, why_not)
        if raw is not None:
            raw.save(parts)
        if items is not None:
            items.save(parts)
        _write_weights(parts / WEIGHTS, contents, records)
        finish(parts, {**manifest, "compiled": why_not is None}, key)
    return folder


def compile_anew(
    package: str | Path,
    folder: str | Path,
    *,
    sign: str | Path | None = None,
    public_key: str | Path | None = None,
) -> Path:
    """Compile a package that was made for another machine or torch for this one, into a new package.

    The weights are linked if both packages are on one file system, and copied otherwise.

    Args:
        package: a folder with an exported program.
        folder: the new package, which must not exist yet.
        sign: PEM file of the ed25519 private key to sign the new package with.
        public_key: PEM file of the ed25519 public key that must have signed the package.

    Returns: the folder.

    Raises:
        PackageError: the folder is not a package, is damaged or not signed by the key, or its program needs
            another version.
        ValueError: the new folder exists, nothing can be compiled here, or a key is not one.
        ModuleNotFoundError: a key is given, and the package cryptography is missing.
    """
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder} exists already. Name another folder, or remove it.")
    key = None if sign is None else read_private_key(sign)
    package, manifest, _, _ = check_package(package, public_key=public_key)
    weights = Weights(package / WEIGHTS, [WeightRecord(**each) for each in manifest["weights"]]).tensors
    with durable_folder(folder) as parts:
        for name in manifest["sha256"]:
            if name not in (COMPILED, SHARED, LAYOUT):
                link(package / name, parts / name)
        for compiled_name, exported_name in ((COMPILED, EXPORTED), (SHARED, SHARED_EXPORTED)):
            if (package / exported_name).is_file():
                found = load_exported(package / exported_name)
                shared = manifest["shared"] if exported_name == SHARED_EXPORTED else []
                inputs = example_inputs(weights, manifest["num_dense"], manifest["features"], shared)
                found._example_inputs = inputs, {}
                why_not = compile_program(found, parts / compiled_name)
                if why_not is not None:
                    raise ValueError(f"{package} cannot be compiled here: {why_not}. Serve it from Python.")
        finish(parts, {**manifest, "compiled": True}, key)
    return folder


def compile_program(exported: "torch.export.ExportedProgram", target: Path) -> str | None:
    """Compile a program for this machine with AOTInductor; return why that is impossible, or None."""
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        return f"no C++ compiler: {compiler!r} was not found; set CXX"
    if " " in torch.__file__:  # its compiler splits its commands there
        return f"torch compiles nothing below a folder with a space: {Path(torch.__file__).parent}"
    with warnings.catch_warnings():
        # Torch's compiler copies tree specs, whose class warns of its own deprecation.
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        torch._inductor.aoti_compile_and_package(exported, package_path=str(target))
    return None


def rows_of(model: nn.Module) -> dict[str, int]:
    """Return the number of IDs that each feature allows, for tables that report other IDs as errors."""
    found: dict[str, int] = {}
    for child in model.modules():
        if isinstance(child, TableCollection) and child.bounds_check is BoundsCheckMode.ERROR:
            for config, _ in child.tables().values():
                if config.keys is not None:  # no ID is outside
                    continue
                for feature in config.feature_names:
                    found[feature] = min(config.num_embeddings, found.get(feature, config.num_embeddings))
    return found


def _read_raw(model: nn.Module) -> set[str]:
    """Return the features that hashed tables alone read: every int64 is an ID of theirs."""
    readers: dict[str, list[bool]] = {}
    for child in model.modules():
        if isinstance(child, TableCollection):
            for config, _ in child.tables().values():
                for feature in config.feature_names:
                    readers.setdefault(feature, []).append(config.keys is not None)
    return {feature for feature, hashed in readers.items() if all(hashed)}


def _check(
    state: Mapping[str, Tensor],
    features: Sequence[str],
    num_dense: int,
    shared: Sequence[str],
    raw: RawValues | None,
) -> None:
    for name, tensor in state.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{name} is {tensor.dtype}; a package holds {', '.join(DTYPES.values())}. Convert it first."
            )
    known = [*features, *([DENSE] if num_dense else [])]
    unknown = [name for name in shared if name not in known]
    if unknown or (shared and set(known) <= set(shared)):
        raise ValueError(
            f"shared must name some of {known}, not all of them, got {list(shared)}. "
            "Name what belongs to the user."
        )
    if raw is not None and (raw.keys != list(features) or raw.num_dense != num_dense):
        raise ValueError(
            f"the raw values make {raw.keys} and {raw.num_dense} dense values, and the model reads "
            f"{list(features)} and {num_dense}. Give the features that it was trained on."
        )


def _hashed(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the formulas of keys and first rows of hashed tables, by the name of the weight."""
    found = {}
    for path, child in model.named_modules():
        if isinstance(child, ServedTable):
            first, storage = first_rows_of(child.storage), child.storage
            found[f"{path}.weight"] = {
                "seed": storage.keys.seed,
                "max_rows": storage.max_rows,
                "dim": storage.dim,
                "first_seed": first.seed,
                "low": first.low,
                "high": first.high,
            }
    return found


def _types_of(model: nn.Module) -> dict[str, str]:
    """Return the data types of quantised tables, by the name of the weight."""
    found = {}
    for path, child in model.named_modules():
        if isinstance(child, TableCollection):
            for name, (config, _) in child.tables().items():
                if config.data_type.bits:
                    found[f"{path}.{name}" if path else name] = str(config.data_type)
    return found


def _exported(
    program: Program,
    model: nn.Module,
    weights: list[Tensor],
    features: Sequence[str],
    *,
    num_dense: int,
    shared: Sequence[str],
    growing: Sequence[bool],
) -> "torch.export.ExportedProgram":
    try:
        return exported(program, weights, features, num_dense, shared, growing=growing)
    except Exception as error:
        several = f" with the shared features {list(shared)}" if shared else ""
        raise ValueError(
            f"{type(model).__name__} cannot be exported{several}: {error}. Give it a forward that "
            f"torch.export takes, and the features that it reads (given: {list(features)})."
        ) from error


def link(source: Path, target: Path) -> None:
    """Make a hard link to a file, or copy it to another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _in_memory(contents: Mapping[str, Tensor | ServedRows]) -> dict[str, Tensor]:
    return {
        name: each if isinstance(each, Tensor) else torch.cat([each.empty(), *each.blocks()])
        for name, each in contents.items()
    }


def _records(state: Mapping[str, Tensor | ServedRows]) -> list[WeightRecord]:
    """Assign each tensor its position in ``weights.bin``."""
    records, end = [], 0
    for name, tensor in state.items():
        record = WeightRecord(name, DTYPES[tensor.dtype], list(tensor.shape), end + -end % ALIGNMENT)
        records.append(record)
        end = record.offset + record.num_bytes
    return records


def _write_weights(
    path: Path, state: Mapping[str, Tensor | ServedRows], records: Sequence[WeightRecord]
) -> None:
    with path.open("wb") as file:
        for each, record in zip(state.values(), records, strict=True):
            file.write(b"\0" * (record.offset - file.tell()))
            for tensor in [each] if isinstance(each, Tensor) else each.blocks():
                if tensor.numel():
                    flat = tensor.detach().cpu().reshape(-1).view(torch.uint8)
                    for block in flat.split(_BLOCK):
                        file.write(block.numpy().tobytes())
        file.write(b"\0" * (-file.tell() % ALIGNMENT))


def finish(parts: Path, manifest: Mapping[str, Any], key: "Ed25519PrivateKey | None" = None) -> None:
    """Write the files that describe a package, and its signature, last of all."""
    made_by = {"format": FORMAT, "torch": _torch(), "isa": isa(), "operators": operators()}
    manifest = {**manifest, **made_by}
    (parts / LAYOUT).write_text(layout_of(manifest))
    files = {path.name: sha256_of(path) for path in sorted(parts.iterdir())}
    with (parts / MANIFEST).open("w") as file:
        json.dump({**manifest, "sha256": files}, file, indent=1)
    write_digests(parts, known=files)
    if key is not None:
        sign_package(parts, key)


def _torch() -> str:
    return torch.__version__.split("+")[0]
