"""pyarrow's modules, imported at their first use: training and serving without files run without pyarrow."""

from typing import TYPE_CHECKING, Any

from meshrec.data.faults import needs

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.csv as pa_csv
    import pyarrow.fs as pa_fs
    import pyarrow.json as pa_json
    import pyarrow.parquet as pa_parquet
else:

    class _LateModule:
        """Stand-in for a module that is imported when an attribute is first read."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            value = getattr(needs(self._name, "data"), attribute)
            # Later reads find it here, without __getattr__.
            self.__dict__[attribute] = value
            return value

    pa, pc = _LateModule("pyarrow"), _LateModule("pyarrow.compute")
    pa_csv, pa_fs = _LateModule("pyarrow.csv"), _LateModule("pyarrow.fs")
    pa_json, pa_parquet = _LateModule("pyarrow.json"), _LateModule("pyarrow.parquet")


def records_of(table: Any) -> list[dict[str, Any]]:
    """Return the rows of an Arrow table as dictionaries.

    Timestamps are strings, because Python has neither their nanoseconds nor all of their years.
    """
    for index, field in enumerate(table.schema):
        if pa.types.is_timestamp(field.type):
            table = table.set_column(index, field.name, table.column(index).cast(pa.string()))
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


__all__ = ["pa", "pa_csv", "pa_fs", "pa_json", "pa_parquet", "pc", "records_of"]
