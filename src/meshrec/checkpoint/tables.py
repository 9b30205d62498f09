"""Export of a checkpoint's weights to a safetensors file, and import of weights into a checkpoint.

Both work block by block, so a table may be larger than memory.
"""

import logging
import pickle
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from meshrec.checkpoint.blocks import FileWriter, grid_of, memory_of, read_region
from meshrec.checkpoint.data_file import TensorPart, header_of, write_data_file
from meshrec.checkpoint.manifest import MANIFEST, Manifest, TensorRecord
from meshrec.checkpoint.reading import open_data, read_manifest, stored_rows
from meshrec.checkpoint.safetensors import read_mapped
from meshrec.durable import DamageError, durable_file, open_regular, write_durably

_log = logging.getLogger(__name__)


def export_safetensors(folder: str | Path, target: str | Path, *, entry: str | None = None) -> list[str]:
    """Write the whole tensors of one module to a safetensors file, and return their names.

    Args:
        folder: a checkpoint.
        target: the file; it must not exist yet.
        entry: the module's name in the saved state (default: the only module).

    Raises:
        ValueError: the entry does not exist, or the target does.
        DamagedCheckpointError: the data is not what was written. No file is left then.
    """
    folder, target = Path(folder), Path(target)
    manifest = read_manifest(folder)
    entry = _chosen_entry(manifest, entry)
    records = {
        name.removeprefix(f"{entry}."): (name, record)
        for name, record in manifest.tensors.items()
        if record.entry == entry
    }
    if target.exists():
        raise ValueError(f"{target} exists. Name another file, or remove it.")
    with durable_file(target) as file:
        writer = FileWriter(file.fileno())
        writer.write(header_of({name: (record.dtype, record.shape) for name, (_, record) in records.items()}))
        for full_name, record in records.values():
            for block in whole_blocks(folder, manifest, full_name, record):
                writer.write(memory_of(block))
    return list(records)


def import_weights(
    source: str | Path, folder: str | Path, *, entry: str = "model", rename: Sequence[tuple[str, str]] = ()
) -> list[str]:
    """Make a checkpoint of one module from a plain state_dict, and return the names in it.

    Load it with ``load(folder, {entry: model}, partial=True)``, under any plan. The rest of the model keeps
    its values.

    Args:
        source: a safetensors file, or a file of ``torch.save(module.state_dict())``. The latter is read with
            ``weights_only=True``, so no code in it is executed.
        folder: the new checkpoint; it must not exist yet.
        entry: the name of the module in the state.
        rename: pairs of a regular expression and the replacement of its match in names, such as
            ``(r"^emb\\.(\\w+)\\.weight$", r"ebc.embedding_bags.\\1.weight")``. For each name, the first
            expression that matches is applied.

    Raises:
        ValueError: the file is of another kind, two names become equal, or the folder is a checkpoint
            already.
    """
    source, folder = Path(source), Path(folder)
    if (folder / MANIFEST).exists():
        raise ValueError(f"{folder} is a checkpoint already. Name another folder.")
    named: dict[str, Tensor] = {}
    for name, tensor in read_weights(source).items():
        new = _renamed(name, rename)
        if new in named:
            raise ValueError(f"{source} has two tensors that are called {new!r} after renaming.")
        named[new] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    parts = [
        TensorPart(f"{entry}.{name}", (0,) * tensor.ndim, tuple(tensor.shape), tensor)
        for name, tensor in named.items()
    ]
    with ThreadPoolExecutor(1) as pool:
        path = folder / f"data-{secrets.token_hex(4)}-00000.safetensors"
        written = write_data_file(path, parts, pool)
    records = {
        part.name: TensorRecord(entry, part.tensor.dtype, part.size, (piece._replace(file=0),))
        for part, piece in zip(parts, written.pieces, strict=True)
    }
    content = {name: {"__tensor__": f"{entry}.{name}"} for name in named}
    values = {entry: {"kind": "module", "content": content}}
    manifest = Manifest(step=None, world_size=1, files=(written.file,), tensors=records, values=values)
    write_durably(folder / MANIFEST, manifest.to_bytes())
    return list(named)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file or of a plain state_dict, mapped into memory.

    Raises:
        ValueError: the file is of another kind.
    """
    try:
        if path.suffix == ".safetensors":
            return read_mapped(path)
        with open_regular(path):
            pass  # torch.load would wait for a pipe's writer
    except DamageError as error:
        raise ValueError(f"{path} is no file of plain tensors: {error}.") from error
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{path} is no file of plain tensors: {reason} Write it with torch.save(module.state_dict(), "
            "path), or as *.safetensors."
        ) from error
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(
            f"{path} holds a {type(found).__name__}, but not of names and tensors only. Save "
            f"module.state_dict()."
        )
    return {str(name): value.detach() for name, value in found.items()}


def _chosen_entry(manifest: Manifest, entry: str | None) -> str:
    modules = [name for name, value in manifest.values.items() if value["kind"] == "module"]
    if entry is None and len(modules) == 1:
        return modules[0]
    if entry not in modules:
        raise ValueError(f"there is no module {entry!r} in the checkpoint. Name one of {modules}.")
    return entry


def whole_blocks(folder: Path, manifest: Manifest, name: str, record: TensorRecord) -> Iterator[Tensor]:
    """Yield a tensor in blocks of whole rows, which are assembled from its pieces."""
    grid = grid_of(record.shape, record.dtype)
    shape = record.shape or (1,)
    with ExitStack() as stack:
        numbers = {piece.file for piece in record.pieces}
        opened = {n: stack.enter_context(open_data(folder, manifest, n)) for n in sorted(numbers)}
        for first in grid.blocks():
            end = min(first + grid.rows_per_block, grid.num_rows)
            block = torch.empty((end - first, *shape[1:]), dtype=record.dtype)
            for piece in record.pieces:
                offset, size = piece.offset or (0,), piece.shape or (1,)
                low, high = max(first, offset[0]), min(end, offset[0] + size[0])
                if low >= high or 0 in size:
                    continue
                target = block[low - first : high - first]
                for dim in range(1, len(size)):
                    target = target.narrow(dim, offset[dim], size[dim])
                stored = stored_rows(folder, manifest, opened[piece.file], name, record=record, piece=piece)
                if not piece.shape:
                    target = target[0]
                read_region(stored, (low - offset[0], *[0] * (len(size) - 1))[: len(piece.shape)], target)
            yield block


def _renamed(name: str, rename: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in rename:
        try:
            new, count = re.subn(pattern, replacement, name)
        except (re.error, IndexError) as error:
            raise ValueError(
                f"rename: {pattern!r} by {replacement!r} cannot be: {error}. Give a regular expression, and "
                "its groups as \\1."
            ) from error
        if count:
            return new
    return name
