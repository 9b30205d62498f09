"""Export checkpoint weights to safetensors, and create a checkpoint from plain weights.

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

from meshrec.checkpoint.blocks import FileWriter, grid_of, memory_of
from meshrec.checkpoint.data_file import TensorPart, header_of, write_data_file
from meshrec.checkpoint.manifest import MANIFEST, Manifest, TensorRecord
from meshrec.checkpoint.reading import open_data, read_manifest, read_rows
from meshrec.checkpoint.safetensors import read_mapped
from meshrec.durable import DamageError, durable_file, open_regular, write_durably

_log = logging.getLogger(__name__)


def export_safetensors(folder: str | Path, target: str | Path, *, entry: str | None = None) -> list[str]:
    """Write all tensors of a module in a checkpoint to a safetensors file.

    Args:
        folder: checkpoint folder.
        target: new file.
        entry: name of the module in the saved state. None stands for the only module.

    Returns:
        Names of the written tensors, without the entry name.

    Raises:
        ValueError: the checkpoint lacks the module, or ``target`` exists.
        DamagedCheckpointError: the checkpoint is damaged; no output file is left behind.
    """
    folder, target = Path(folder), Path(target)
    manifest = read_manifest(folder)
    entry = _module_entry(manifest, entry)
    records = {
        name.removeprefix(f"{entry}."): (name, record)
        for name, record in manifest.tensors.items()
        if record.entry == entry
    }
    if target.exists():
        raise ValueError(f"{target} exists. Name another file, or remove it.")
    with durable_file(target) as file:
        writer = FileWriter(file.fileno())
        # The header needs only dtypes and shapes, so it can be written before any value is read.
        writer.write(header_of({name: (record.dtype, record.shape) for name, (_, record) in records.items()}))
        for full_name, record in records.values():
            for block in whole_blocks(folder, manifest, full_name, record):
                writer.write(memory_of(block))
    return list(records)


def import_weights(
    source: str | Path, folder: str | Path, *, entry: str = "model", rename: Sequence[tuple[str, str]] = ()
) -> list[str]:
    """Create a checkpoint with a single module, from a file with a plain state dict.

    To load it under any plan, call ``load(folder, {entry: model}, partial=True)``. Model weights that the
    file lacks are then unchanged.

    Args:
        source: safetensors file, or output of ``torch.save(module.state_dict())``. The latter is read with
            ``weights_only=True``, so no code in it is executed.
        folder: folder for the new checkpoint.
        entry: module name in the checkpoint.
        rename: pairs (regular expression, replacement), such as ``(r"^emb\\.(\\w+)\\.weight$",
            r"ebc.embedding_bags.\\1.weight")``. For every name, only the first matching pair is applied.

    Returns:
        Names of the tensors in the checkpoint, without the entry name.

    Raises:
        ValueError: the file has another format, two tensors get the same name, or ``folder`` already has a
            checkpoint.
    """
    source, folder = Path(source), Path(folder)
    if (folder / MANIFEST).exists():
        raise ValueError(f"{folder} is a checkpoint already. Name another folder.")
    named: dict[str, Tensor] = {}
    for name, tensor in read_weights(source).items():
        new = _rename(name, rename)
        if new in named:
            raise ValueError(f"{source} has two tensors that are called {new!r} after renaming.")
        named[new] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    parts = [
        TensorPart(f"{entry}.{name}", (0,) * tensor.ndim, tuple(tensor.shape), tensor)
        for name, tensor in named.items()
    ]
    with ThreadPoolExecutor(1) as pool:
        # A name that a save would use, so that removal recognizes the file.
        path = folder / f"data-{secrets.token_hex(4)}-00000.safetensors"
        # The manifest is written last, as in a save, so an interrupted import leaves no checkpoint.
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
    """Map a weight file into memory, and return the tensors by name, on the CPU.

    Args:
        path: safetensors file, or a state dict written by ``torch.save``.

    Raises:
        ValueError: the file has another format.
    """
    try:
        if path.suffix == ".safetensors":
            return read_mapped(path)
        with open_regular(path):
            pass  # raises for a pipe, on which torch.load would wait forever
    except DamageError as error:
        raise ValueError(f"{path} is not a file of plain tensors: {error}.") from error
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{path} is not a file of plain tensors: {reason} Write it with torch.save(module.state_dict(), "
            "path), or as *.safetensors."
        ) from error
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ValueError(
            f"{path} contains a {type(loaded).__name__} which does not map names to tensors only. Save "
            f"module.state_dict()."
        )
    return {str(name): value.detach() for name, value in loaded.items()}


def _module_entry(manifest: Manifest, entry: str | None) -> str:
    """Return a module's entry name, by default the only one. Raise ValueError if it does not exist."""
    modules = [name for name, value in manifest.values.items() if value["kind"] == "module"]
    if entry is None and len(modules) == 1:
        return modules[0]
    if entry not in modules:
        raise ValueError(f"the checkpoint has no module {entry!r}. Modules: {modules}.")
    return entry


def whole_blocks(folder: Path, manifest: Manifest, name: str, record: TensorRecord) -> Iterator[Tensor]:
    """Read a checkpoint tensor completely, in blocks of whole rows.

    Args:
        folder: checkpoint folder.
        manifest: checkpoint manifest.
        name: tensor name.
        record: tensor record.

    Yields:
        Consecutive rows, with the stored dtype.
    """
    grid = grid_of(record.shape, record.dtype)
    with ExitStack() as stack:
        files = sorted({piece.file for piece in record.pieces})
        # Open files once, because opening verifies the file's header.
        opened = {file: stack.enter_context(open_data(folder, manifest, file)) for file in files}
        for first in grid.blocks():
            end = min(first + grid.rows_per_block, grid.num_rows)
            yield read_rows(folder, manifest, name, (first, end), opened=opened)


def _rename(name: str, rename: Sequence[tuple[str, str]]) -> str:
    """Return the new name of a tensor; see `import_weights`."""
    for pattern, replacement in rename:
        try:
            new, count = re.subn(pattern, replacement, name)
        except (re.error, IndexError) as error:
            raise ValueError(
                f"rename: cannot replace {pattern!r} by {replacement!r}: {error}. Pass a regular "
                "expression, and its groups as \\1."
            ) from error
        # The first pattern that matches decides; later patterns do not see the new name.
        if count:
            return new
    return name
