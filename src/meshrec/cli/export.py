"""``meshrec export``: write a run's model as a package for serving, or as an ONNX file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from meshrec.cli.arguments import Words, check_output, parse
from meshrec.cli.run_options import RunOptions
from meshrec.export.manifest import MANIFEST
from meshrec.export.package import compile_anew
from meshrec.export.predictor import Predictor
from meshrec.export.triton import write_triton
from meshrec.plan.text import size_text
from meshrec.runs.export import export_run
from meshrec.runs.quantize import quantised_run_name
from meshrec.runs.saved_recipe import load_recipe
from meshrec.train.run_folder import CONFIG, RunFolder, finished_refit


@dataclass(frozen=True, kw_only=True)
class ExportOptions(RunOptions):
    """Write a package: the model compiled for this machine, a weight file to be memory-mapped, and the
    request schema.

    Read it in Python with meshrec.export.Predictor, or in C++ without Python (csrc/runtime). A package from
    another machine or torch version can be compiled again for this one.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run name or folder, to export the reported weights; or package, to compile it again."""
    out: Path
    """Folder for the new package, or file with --format onnx; it must not exist."""
    format: Literal["package", "onnx"] = "package"
    """onnx: an ONNX file that includes the tables and takes IDs and numbers, for models without histories or
    hashed tables.
    """
    quantised: Path | None = None
    """Checkpoint written by `meshrec quantize` for this run: export its weights instead."""
    shared: Words = ()
    """User features, for ranking many items for a user: they are looked up once per request. "dense" means
    all dense values.
    """
    tower: Literal["query", "item"] | None = None
    """Export a tower of a two-tower model; the package then returns vectors."""
    vectors: Path | None = None
    """File for the item vectors, .parquet or .npy; only with --tower item."""
    force: bool = False
    """Replace an existing --vectors file."""
    items: Words = ()
    """Parquet or CSV files with the items; none: the catalog in the run's data, or all table rows of the
    tower's only feature.
    """
    compile: bool = True
    """Compile the model; otherwise Python runs it, which is slower."""
    torchscript: bool = False
    """Also write a TorchScript file into the package. PyTorch has deprecated TorchScript."""
    sign: Path | None = None
    """PEM file with an ed25519 private key: sign the package, so that servers can require the signature."""
    require_signature: Path | None = None
    """PEM file with the ed25519 public key that must have signed a package to compile again."""
    triton: Path | None = None
    """Model repository of NVIDIA's Triton server, new or existing, to which the model is added."""


def main(arguments: Sequence[str]) -> int:
    options = parse(ExportOptions, arguments, program="meshrec export")
    if (options.vectors is not None or options.items) and options.tower != "item":
        raise ValueError("--vectors and --items go with --tower item. Add it, or leave them out.")
    if options.items and options.vectors is None:
        raise ValueError("--items needs --vectors: the file for their vectors.")
    if options.vectors is not None:
        check_output(options.vectors, force=options.force, option="--vectors")
        if options.vectors.suffix not in (".parquet", ".npy"):
            raise ValueError(f"{options.vectors} must end in .parquet or .npy. Name such a file.")
    if options.format == "onnx":
        return _write_onnx(options)
    # RUN is a package, to be compiled again for this machine.
    if (Path(options.run) / MANIFEST).is_file():
        folder = compile_anew(
            options.run, options.out, sign=options.sign, public_key=options.require_signature
        )
    else:
        if options.require_signature is not None:
            raise ValueError("--require-signature goes with a package, and a run has none. Leave it out.")
        run = _find_run(options)
        folder = export_run(
            run,
            options.out,
            step=options.step,
            last=options.last,
            quantised=options.quantised,
            tower=options.tower,
            shared=options.shared,
            compile=options.compile,
            torchscript=options.torchscript,
            sign=options.sign,
        )
        _propose_refit(run)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"the package: {folder} ({size_text(size)})")
    print(f"from Python: meshrec.export.Predictor({str(folder)!r}); from C++: see csrc/runtime/predictor.h")
    if options.triton is not None:
        print(f"for Triton: {write_triton(folder, options.triton, name=folder.name)}")
    if options.vectors is not None:
        num, width = _write_vectors(options, Predictor(folder))
        print(f"{options.vectors}: {num:,} vectors of {width}")
    return 0


def _find_run(options: ExportOptions) -> RunFolder:
    """Find the run to export.

    With --quantised, this is the first fit or the refit, depending on which of them was quantized.
    """
    if options.quantised is None:
        return options.folder()
    run = options.first_fit()
    final = finished_refit(run)
    return final if final is not None and quantised_run_name(options.quantised) == final.name else run


_PACKAGE_OPTIONS = ("quantised", "shared", "vectors", "torchscript", "sign", "require_signature", "triton")
"""Options that cannot be combined with ``--format onnx``."""


def _write_onnx(options: ExportOptions) -> int:
    """Write the run's model as an ONNX file."""
    if given := [f"--{name.replace('_', '-')}" for name in _PACKAGE_OPTIONS if getattr(options, name)]:
        raise ValueError(f"{given[0]} is for packages, and --format is onnx. Leave one of them out.")
    run = options.folder()
    path = export_run(
        run,
        options.out,
        step=options.step,
        last=options.last,
        tower=options.tower,
        onnx=True,
    )
    _propose_refit(run)
    print(f"the ONNX file: {path} ({size_text(path.stat().st_size)})")
    print(
        f"from Python: onnxruntime.InferenceSession({str(path)!r}); it takes IDs and numbers, not raw values"
    )
    return 0


def _propose_refit(run: RunFolder) -> None:
    """Print the command for a refit on all rows, if the run held back rows and does not have a refit yet."""
    from meshrec.runs.refit import can_refit
    from meshrec.runs.worker import next_commands

    config = run.read_json(CONFIG) or {}
    if config.get("all_rows") or finished_refit(run) is not None or not can_refit(run, load_recipe(run)):
        return
    samples = config["data"]["samples"]
    held_back = (samples["validation"] or 0) + (samples["test"] or 0)
    print(
        f"this model has not learned from {held_back:,} of {held_back + samples['train']:,} samples, which "
        f"judged it. To fit on all of them, and export again: {next_commands(run)['final']}"
    )


def _write_vectors(options: ExportOptions, predictor: Predictor) -> tuple[int, int]:
    """Write the item vectors of a two-tower model to the file ``--vectors``, and return their shape.

    A Parquet file has the column ``vector``, and columns that identify the items. With --items, these are the
    columns of that data. Without it, they are ``item``, or, if the data has no catalog, ``row`` and the value
    of the tower's only feature.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    from meshrec.export.towers import catalogue_vectors, row_vectors, vectors_of_raw_items
    from meshrec.runs.fitting import description_of_run, features_of
    from meshrec.runs.recommending import ItemValues
    from meshrec.runs.vectors import values_of_rows
    from meshrec.train.log_sources import LogSource

    assert options.vectors is not None
    if options.items:
        items = read_items(options.items, predictor.raw.kinds if predictor.raw is not None else {})
        vectors = vectors_of_raw_items(predictor, items)
    else:
        run = _find_run(options)
        source = load_recipe(run).data
        dataset = description_of_run(source, run)
        if dataset.catalogue is not None and dataset.item is not None:
            vectors = catalogue_vectors(predictor, dataset.catalogue)
            ids = dataset.catalogue[dataset.item].values().numpy()
            values = pa.array(ids)
            if isinstance(source, LogSource):
                values = ItemValues.of(source, features_of(run)).take(ids)
            items = pa.table({"item": values})
        else:
            vectors = row_vectors(predictor)
            # Without a catalog, the tower must have a single feature, whose table rows are the items.
            (feature,) = predictor.features
            values = values_of_rows(run, feature, len(vectors))
            items = pa.table({"row": pa.array(np.arange(len(vectors), dtype=np.int64)), feature: values})
    if options.vectors.suffix == ".npy":
        np.save(options.vectors, vectors)
    else:
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
        parquet.write_table(items.append_column("vector", column), options.vectors)
    return vectors.shape


def read_items(paths: Sequence[str], kinds: Mapping[str, str]) -> Any:
    """Read Parquet or CSV files, and return a single Arrow table.

    Args:
        paths: files, folders or patterns.
        kinds: kind of CSV columns, such as "text", by name.
    """
    import pyarrow as pa

    from meshrec.data.frames import read_csvs, read_parquets
    from meshrec.data.locations import expand_tables

    files, text = expand_tables(list(paths))
    if text:
        return pa.concat_tables(read_csvs(files, kinds))
    return pa.concat_tables(read_parquets(files, kinds=kinds), promote_options="permissive")
