"""``meshrec checkpoint``: inspect and verify checkpoints; export and import weights."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from meshrec.checkpoint import export_safetensors, find_checkpoint, import_weights, read_manifest, verify_data
from meshrec.checkpoint.finding import all_checkpoints
from meshrec.checkpoint.manifest import DTYPE_NAMES, Manifest
from meshrec.cli.arguments import check_output, parse, wide_console
from meshrec.cli.run_options import reported_fit
from meshrec.plan.text import size_text
from meshrec.train.run_folder import CONFIG, RUNS, RunFolder, finished_refit, run_or_path

# Width of tables if the output is not a terminal.
_PIPE_WIDTH = 140


@dataclass(frozen=True, kw_only=True)
class _CheckpointOptions:
    """Common options of subcommands, which select a checkpoint."""

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """Checkpoint; or folder with checkpoints, to use the newest; or run name or folder, to use the reported
    weights.
    """
    step: int | None = None
    """Use the checkpoint at this step instead."""
    last: bool = False
    """Use a run's last checkpoint instead of the best."""
    first: bool = False
    """Use the first fit of a run with a refit on all rows (--final all)."""
    runs: Path = RUNS
    """Folder with all runs."""

    def find(self) -> Path:
        """Return the path of the selected checkpoint.

        For a run with a refit on all rows, this is a checkpoint of the refit.
        """
        path = run_or_path(self.path, self.runs)
        # --first, --last and --step select a checkpoint of the first fit.
        if (path / CONFIG).is_file() and not (self.first or self.last or self.step is not None):
            path = reported_fit(RunFolder(path)).path
        return find_checkpoint(path, step=self.step, last=self.last)


@dataclass(frozen=True, kw_only=True)
class CheckpointInspectOptions(_CheckpointOptions):
    """Show the contents of a checkpoint: step, entries, and tensors with types, shapes and sizes."""

    json: bool = False
    """Print the contents as JSON."""


@dataclass(frozen=True, kw_only=True)
class CheckpointVerifyOptions:
    """Read a checkpoint completely, or all checkpoints in a folder, and compare the checksums."""

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """Checkpoint, folder with checkpoints, or run name or folder."""
    runs: Path = RUNS
    """Folder with all runs."""


@dataclass(frozen=True, kw_only=True)
class CheckpointExportOptions(_CheckpointOptions):
    """Write a checkpoint's model weights to a safetensors file. Shards are joined to whole tensors."""

    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """File to write."""
    to: str = "safetensors"
    """File format; only safetensors."""
    entry: str | None = None
    """Saved module to export, such as model; required if the checkpoint has several modules."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Create a checkpoint from a safetensors file, or from a state_dict written by torch.save."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """File to read. Code in it is never executed."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """Folder for the new checkpoint."""
    entry: str = "model"
    """Name under which the checkpoint stores the weights."""
    rename: Annotated[
        tuple[tuple[str, str], ...], tyro.conf.arg(metavar="REGEX TEXT ...", help_behavior_hint="")
    ] = ()
    """Pairs of regular expression and replacement for tensor names, such as "^module." "". The first matching
    expression is applied to a name.
    """


Command = (
    Annotated[CheckpointInspectOptions, tyro.conf.subcommand("inspect")]
    | Annotated[CheckpointVerifyOptions, tyro.conf.subcommand("verify")]
    | Annotated[CheckpointExportOptions, tyro.conf.subcommand("export")]
    | Annotated[ImportOptions, tyro.conf.subcommand("import")]
)


def main(arguments: Sequence[str]) -> int:
    options: Any = parse(Command, arguments, program="meshrec checkpoint")
    return run(options)


def run(
    options: CheckpointInspectOptions | CheckpointVerifyOptions | CheckpointExportOptions | ImportOptions,
) -> int:
    """Run a subcommand, and return the exit code: 1 if `verify` found a damaged checkpoint, else 0.

    Args:
        options: parsed options. Their class determines the subcommand.

    Raises:
        ValueError: an option or a file cannot be used.
    """
    console = wide_console(_PIPE_WIDTH)
    match options:
        case CheckpointInspectOptions():
            path = options.find()
            manifest = read_manifest(path)
            if options.json:
                print(json.dumps(_summary(path, manifest)))
            else:
                _print(console, path, manifest)
        case CheckpointVerifyOptions():
            return _verify(console, run_or_path(options.path, options.runs))
        case CheckpointExportOptions():
            if options.to != "safetensors":
                raise ValueError(
                    f"--to {options.to}: checkpoints are exported to safetensors. Leave --to out."
                )
            # This checks the folder only. `export_safetensors` raises if the file exists.
            check_output(options.out, force=True)
            path = options.find()
            names = export_safetensors(path, options.out, entry=options.entry)
            console.print(f"{path}: {len(names)} tensors in {options.out}")
        case ImportOptions():
            names = import_weights(options.source, options.out, entry=options.entry, rename=options.rename)
            console.print(f"{len(names)} tensors in {options.out}: {', '.join(names)}")
    return 0


def _verify(console: Console, path: Path) -> int:
    """Verify all checkpoints in a folder or run, including its refit. Return 1 if any is damaged, else 0."""
    failed = 0
    final = finished_refit(RunFolder(path))
    # Checkpoints that were not finished are reported as damaged.
    paths = [*all_checkpoints(path), *([] if final is None else all_checkpoints(final.path))]
    for checkpoint in paths:
        try:
            manifest = read_manifest(checkpoint)
            verify_data(checkpoint, manifest)
            console.print(f"{checkpoint}: sound, {size_text(manifest.num_bytes)}")
        # CheckpointError. The remaining checkpoints are still verified.
        except RuntimeError as error:
            failed = 1
            console.print(str(error), markup=False)
    return failed


def _summary(path: Path, manifest: Manifest) -> dict[str, Any]:
    """Return a description of a checkpoint as plain JSON types."""
    return {
        "path": str(path),
        "step": manifest.step,
        "world_size": manifest.world_size,
        "bytes": manifest.num_bytes,
        "entries": {name: value["kind"] for name, value in manifest.values.items()},
        "tensors": {
            name: {
                "dtype": DTYPE_NAMES[record.dtype],
                "shape": record.shape,
                "bytes": record.num_bytes,
                "pieces": len(record.pieces),
            }
            for name, record in manifest.tensors.items()
        },
    }


def _print(console: Console, path: Path, manifest: Manifest) -> None:
    """Print a description of a checkpoint, with a table row per tensor."""
    kinds = ", ".join(f"{name} ({value['kind']})" for name, value in manifest.values.items())
    console.print(
        f"{path}: step {manifest.step}, {size_text(manifest.num_bytes)} in {len(manifest.files)} files, "
        f"saved by {manifest.world_size} ranks\nentries: {kinds}"
    )
    grid = Table()
    for column in ("tensor", "type", "shape", "size", "pieces"):
        grid.add_column(column, justify="left" if column in ("tensor", "type") else "right")
    for name, record in sorted(manifest.tensors.items()):
        shape = " x ".join(map(str, record.shape)) or "number"
        grid.add_row(
            name, DTYPE_NAMES[record.dtype], shape, size_text(record.num_bytes), str(len(record.pieces))
        )
    console.print(grid)
