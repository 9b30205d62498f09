"""Arrow file with the vocabularies of fitted features, which is memory-mapped.

The file is next to the JSON file with the features, and has the same name with the suffix ``.arrow``. It has
a single row, and for every vocabulary a column with a list: all values. The JSON file has its size and
checksums.
"""

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from meshrec.data.faults import DataError
from meshrec.durable import DamageError, FileDigest, durable_file, open_regular, verify_file
from meshrec.durable.digests import checksums_of


def vocabulary_file(path: str | Path) -> Path:
    """Return the path of the Arrow file that belongs to a JSON file."""
    return Path(path).with_suffix(".arrow")


def write_vocabularies(vocabularies: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """Write vocabularies to the Arrow file, and return its size and checksums for the JSON file."""
    file = vocabulary_file(path)
    lists = {
        # A list of all values in a single row, so that vocabularies of different sizes fit in one table.
        name: pa.LargeListArray.from_arrays(np.array([0, len(values)]), values)
        for name, values in vocabularies.items()
    }
    table = pa.table(lists)
    with durable_file(file) as stream, pa.ipc.new_file(stream, table.schema) as writer:
        writer.write_table(table)
    with open_regular(file) as descriptor:
        num_bytes = os.fstat(descriptor).st_size
        return {"num_bytes": num_bytes, "checksums": checksums_of(descriptor, num_bytes, file.name)}


def map_vocabularies(digest: Mapping[str, Any], path: str | Path) -> mmap.mmap:
    """Map the Arrow file into memory, and return its content.

    Raises:
        DataError: the Arrow file is missing, or is not the file that was written with the JSON file.
    """
    file = vocabulary_file(path)
    try:
        with open_regular(file) as descriptor:
            verify_file(descriptor, FileDigest(digest["num_bytes"], "", tuple(digest["checksums"])), file)
            # Mapped instead of copied: all processes on the host share the pages.
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except (OSError, DamageError) as error:
        raise DataError(
            f"{file}, the vocabularies of {Path(path).name}, cannot be read: {error}. Restore it from a "
            "copy, or fit and train again."
        ) from error


def vocabularies_in(content: mmap.mmap | bytes) -> dict[str, Any]:
    """Return the values by column name from the content of an Arrow file. Values are not copied."""
    table = pa.ipc.open_file(pa.py_buffer(content)).read_all()
    return {name: table[name].chunk(0).flatten() for name in table.column_names}
