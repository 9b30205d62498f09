"""``meshrec export``: a run's model as a package that answers requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from meshrec.cli.arguments import Words, parse
from meshrec.cli.output import check_output
from meshrec.export.manifest import MANIFEST
from meshrec.export.package import compile_anew
from meshrec.export.predictor import Predictor
from meshrec.export.triton import write_triton
from meshrec.plan.text import size_text
from meshrec.runs.export import export_run
from meshrec.train.run_folder import RUNS, find_run


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Writes a package: the model compiled for this machine, its weights in one file that is mapped, and what
    a request must have. It is read by meshrec.export.Predictor, and by C++ without Python (csrc/runtime).

    Of a package that was made on another machine, or with another torch, it makes one for this one.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run, by name or folder: the weights that it reports. Or a package, to compile anew."""
    out: Path
    """The package's folder, which must not be there yet."""
    quantised: Path | None = None
    """A checkpoint of the run that `meshrec quantize` wrote: its weights instead."""
    shared: Words = ()
    """Features of the user, when many items are ranked for one: looked up once a request; "dense" is all
    dense values."""
    tower: Literal["query", "item"] | None = None
    """One side of a two-tower model: the package gives vectors."""
    vectors: Path | None = None
    """With --tower item: write the items' vectors, too, to a .parquet or .npy file."""
    items: Words = ()
    """The items' data, as Parquet or CSV; without it the catalogue of the run's data, or every row of the one
    feature that the tower reads."""
    step: int | None = None
    """The checkpoint of that step instead."""
    last: bool = False
    """The last step instead."""
    trust: bool = False
    """Execute the recipe's source in the run's folder, though somebody else trained the run."""
    runs: Path = RUNS
    """Where run folders are."""
    compile: bool = True
    """Compile the program; otherwise Python serves it, slower."""
    torchscript: bool = False
    """Write a TorchScript file into the package as well. Torch calls it deprecated."""
    triton: Path | None = None
    """Write a model repository for NVIDIA's Triton server, too: a folder, which may have other models."""


def main(arguments: Sequence[str]) -> int:
    """Parses and does it; the exit code."""
    options = parse(ExportOptions, arguments, program="meshrec export")
    if (options.vectors is not None or options.items) and options.tower != "item":
        raise ValueError("--vectors and --items go with --tower item. Add it, or leave them out.")
    if options.items and options.vectors is None:
        raise ValueError("--items needs --vectors: the file for their vectors.")
    if options.vectors is not None:
        check_output(options.vectors)
        if options.vectors.suffix not in (".parquet", ".npy"):
            raise ValueError(f"{options.vectors} must end in .parquet or .npy. Name such a file.")
    if (Path(options.run) / MANIFEST).is_file():
        folder = compile_anew(options.run, options.out)
    else:
        folder = export_run(
            find_run(options.run, options.runs, trust=options.trust),
            options.out,
            step=options.step,
            last=options.last,
            quantised=options.quantised,
            tower=options.tower,
            shared=options.shared,
            compile=options.compile,
            torchscript=options.torchscript,
        )
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"the package: {folder} ({size_text(size)})")
    print(f"from Python: meshrec.export.Predictor({str(folder)!r}); from C++: see csrc/runtime/predictor.h")
    if options.triton is not None:
        print(f"for Triton: {write_triton(folder, options.triton, name=folder.name)}")
    if options.vectors is not None:
        num, width = _write_vectors(options, Predictor(folder))
        print(f"{options.vectors}: {num:,} vectors of {width}")
    return 0


def _write_vectors(options: ExportOptions, predictor: Predictor) -> tuple[int, int]:
    """Columns of the items, or the row's value, beside each vector."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    from meshrec.export.towers import vectors_of_catalogue, vectors_of_items, vectors_of_rows
    from meshrec.runs.fitting import data_of_run
    from meshrec.runs.saved_recipe import load_recipe
    from meshrec.runs.vectors import values_of_rows

    assert options.vectors is not None
    if options.items:
        items = read_items(options.items, predictor.raw.kinds if predictor.raw is not None else {})
        vectors = vectors_of_items(predictor, items)
    else:
        run = find_run(options.run, options.runs, trust=options.trust)
        catalogue = data_of_run(load_recipe(run).data, run).catalogue
        if catalogue is not None:
            vectors = vectors_of_catalogue(predictor, catalogue)
            items = pa.table({"item": pa.array(np.arange(len(vectors), dtype=np.int64))})
        else:
            vectors = vectors_of_rows(predictor)
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
    """Parquet or CSV files, one after another, as an Arrow table; ``kinds`` are those of columns of CSV."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    from meshrec.data.frames import read_csvs
    from meshrec.data.locations import expand_tables

    files, text = expand_tables(list(paths))
    if text:
        return pa.concat_tables(read_csvs(files, kinds))
    tables = [parquet.read_table(each) for each in files]
    return pa.concat_tables(tables, promote_options="permissive")
