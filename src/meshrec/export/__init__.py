"""Packages that answer requests without the code that trained the model: from C++, or from Python."""

from meshrec.export.archive import PackageError
from meshrec.export.package import compile_anew, export
from meshrec.export.predictor import Predictor
from meshrec.ops.library import library_path

__all__ = ["PackageError", "Predictor", "compile_anew", "export", "library_path"]
