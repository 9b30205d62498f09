"""Packages that answer requests without the code that trained the model: from C++, or from Python."""

from meshrec.export.package import PackageError, export
from meshrec.export.predictor import Predictor
from meshrec.export.runs import export_run
from meshrec.ops.library import library_path

__all__ = ["PackageError", "Predictor", "export", "export_run", "library_path"]
