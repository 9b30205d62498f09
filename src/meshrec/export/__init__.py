"""Packages that answer requests without the code that trained the model: from C++, or from Python."""

from typing import TYPE_CHECKING, Any

from meshrec.export.archive import PackageError
from meshrec.export.package import compile_anew, export
from meshrec.export.predictor import Predictor
from meshrec.ops.library import library_path

if TYPE_CHECKING:
    from meshrec.export.runs import export_run

__all__ = ["PackageError", "Predictor", "compile_anew", "export", "export_run", "library_path"]


def __getattr__(name: str) -> Any:
    # It brings all that trains, which a server needs nothing of.
    if name == "export_run":
        from meshrec.export.runs import export_run

        return export_run
    raise AttributeError(f"module 'meshrec.export' has no attribute {name!r}; use one of {__all__}.")
