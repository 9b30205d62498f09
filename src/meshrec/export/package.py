"""A package: a folder with a compiled program, the program to compile it anew, and the weights in one file.

``manifest.json`` says what is in it, and how it was made; ``layout.txt`` the part of it that C++ reads:

    meshrec-package 1
    torch 2.13.0                      what the program was compiled with
    isa AVX512                        the instructions it needs
    dense 13                          columns of the dense input
    feature user                      one line for each feature, in their order
    weight float32 2 1000 64 4096 t.weight   dtype, dimensions, shape, offset in weights.bin, name

It is written beside its place and moved there at the end: a folder with a manifest is whole.
"""

import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import meshrec.ops.library as library
from meshrec.export.program import Program, example_inputs
from meshrec.modules.embedding_configs import BoundsCheckMode
from meshrec.modules.embedding_modules import TableCollection

_log = logging.getLogger(__name__)

FORMAT = 1
MANIFEST, LAYOUT, WEIGHTS = "manifest.json", "layout.txt", "weights.bin"
COMPILED, EXPORTED = "program.pt2", "exported.pt2"
_ALIGNMENT = 4096
_DTYPES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int64: "int64",
}
_BLOCK = 1 << 24


class PackageError(RuntimeError):
    """A package cannot be used: it is damaged, unfinished, or made for something else."""


class WeightRecord(NamedTuple):
    """A tensor in ``weights.bin``; ``offset`` in bytes."""

    name: str
    dtype: str
    shape: list[int]
    offset: int


def export(
    model: nn.Module,
    folder: str | Path,
    *,
    features: Sequence[str],
    num_dense: int,
    scores: Callable[[Tensor], Tensor] = torch.sigmoid,
    about: Mapping[str, Any] | None = None,
    compile: bool = True,
) -> Path:
    """Writes a package of a model that gives one number for each sample.

    The weights are written as they are now, each once; they are never copied in memory as a whole.

    Args:
        model: called as ``model(dense [B, num_dense], sparse)`` it gives logits, [B] or [B, 1]. In evaluation
            mode it must be a function of its input: what torch.export takes.
        folder: the package, which must not be there yet.
        features: the keys of ``sparse``, in the order in which requests give them.
        num_dense: columns of the dense input.
        scores: of logits [B] what requests are told; the default makes probabilities of clicks.
        about: kept in the manifest, such as the run and step that the weights are of.
        compile: compile the program for this machine (needs a C++ compiler); without it, or where no compiler
            is found, the package is served from Python.

    Returns: the folder.

    Raises:
        ValueError: for a folder that is there, a feature that the model lacks, several outputs, a weight of a
            dtype that a package does not hold, and a model that torch.export does not take.
    """
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder} is there already. Name another folder, or remove it.")
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in state.items():
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"{name} is {tensor.dtype}; a package holds {', '.join(_DTYPES.values())}. Convert it first."
            )
    was_training = model.training
    model.eval()
    parts = folder.parent / f".{folder.name}-{secrets.token_hex(4)}"
    parts.mkdir(parents=True)
    try:
        program = Program(model, list(state), features, scores)
        exported = _exported(program, model, [t.detach() for t in state.values()], features, num_dense)
        why_not = compile_program(exported, parts / COMPILED) if compile else "compile=False"
        exported._example_inputs = None  # the weights were among them
        torch.export.save(exported, parts / EXPORTED)
        if why_not is not None:
            _log.warning("the package %s holds no compiled program (%s): Python serves it", folder, why_not)
        records = _write_weights(parts / WEIGHTS, state)
        _write_layout(parts / LAYOUT, records, features, num_dense)
        rows = {feature: num for feature, num in rows_of(model).items() if feature in features}
        _write_manifest(parts, records, features, num_dense, rows, dict(about or {}), why_not)
        os.replace(parts, folder)
    except BaseException:
        shutil.rmtree(parts, ignore_errors=True)
        raise
    finally:
        model.train(was_training)
    return folder


def compile_program(exported: "torch.export.ExportedProgram", target: Path) -> str | None:
    """Compiles for this machine by AOTInductor; says why it could not."""
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        return f"no C++ compiler: {compiler!r} was not found; set CXX"
    if " " in torch.__file__:  # its compiler splits its commands there
        return f"torch compiles nothing below a folder with a space: {Path(torch.__file__).parent}"
    torch._inductor.aoti_compile_and_package(exported, package_path=str(target))
    return None


def rows_of(model: nn.Module) -> dict[str, int]:
    """By feature the rows of its table (the smallest, of several), where ids outside are errors."""
    found: dict[str, int] = {}
    for child in model.modules():
        if isinstance(child, TableCollection) and child.bounds_check is BoundsCheckMode.ERROR:
            for config, _ in child.tables().values():
                for feature in config.feature_names:
                    found[feature] = min(config.num_embeddings, found.get(feature, config.num_embeddings))
    return found


def isa() -> str:
    """The instructions that a program compiled here may use."""
    return str(torch.backends.cpu.get_cpu_capability())


def operators() -> str:
    """A digest of the operators' schemas: a program calls them as they were."""
    return hashlib.sha256("\n".join(sorted(library.schemas())).encode()).hexdigest()[:16]


def _exported(
    program: Program,
    model: nn.Module,
    weights: list[Tensor],
    features: Sequence[str],
    num_dense: int,
) -> "torch.export.ExportedProgram":
    inputs = example_inputs(weights, num_dense, len(features))
    any_size = torch.export.Dim.DYNAMIC
    each = [{0: any_size} for _ in features]
    shapes: Any = ([None] * len(weights), {0: any_size}, each, list(each))
    try:
        with torch.no_grad():
            program(*inputs)
            return torch.export.export(program, inputs, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} cannot be exported: {error}. Give it a forward that torch.export "
            f"takes, and the features that it reads (given: {list(features)})."
        ) from error


def _write_weights(path: Path, state: Mapping[str, Tensor]) -> list[WeightRecord]:
    records = []
    with path.open("wb") as file:
        for name, tensor in state.items():
            file.write(b"\0" * (-file.tell() % _ALIGNMENT))
            shape = list(tensor.shape)
            records.append(WeightRecord(name, _DTYPES[tensor.dtype], shape, file.tell()))
            flat = tensor.detach().cpu().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0)
            for start in range(0, flat.numel(), _BLOCK):
                file.write(flat[start : start + _BLOCK].numpy().tobytes())
        file.write(b"\0" * (-file.tell() % _ALIGNMENT))
        file.flush()
        os.fsync(file.fileno())
    return records


def _write_layout(
    path: Path, records: Sequence[WeightRecord], features: Sequence[str], num_dense: int
) -> None:
    lines = [f"meshrec-package {FORMAT}", f"torch {_torch()}", f"isa {isa()}", f"dense {num_dense}"]
    lines += [f"feature {feature}" for feature in features]
    for record in records:
        shape = " ".join(map(str, [len(record.shape), *record.shape]))
        lines.append(f"weight {record.dtype} {shape} {record.offset} {record.name}")
    path.write_text("\n".join(lines) + "\n")


def _write_manifest(
    parts: Path,
    records: Sequence[WeightRecord],
    features: Sequence[str],
    num_dense: int,
    rows: dict[str, int],
    about: dict[str, Any],
    why_not: str | None,
) -> None:
    files = {path.name: digest_of(path) for path in sorted(parts.iterdir())}
    manifest = {
        "format": FORMAT,
        "torch": _torch(),
        "isa": isa(),
        "operators": operators(),
        "compiled": why_not is None,
        "features": list(features),
        "num_dense": num_dense,
        "rows": rows,
        "weights": [record._asdict() for record in records],
        "about": about,
        "sha256": files,
    }
    path = parts / MANIFEST
    with path.open("w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def digest_of(path: Path) -> str:
    """The SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _torch() -> str:
    return torch.__version__.split("+")[0]
