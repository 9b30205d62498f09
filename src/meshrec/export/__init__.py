"""Packages that answer requests without the code that trained the model: from C++, or from Python."""

from meshrec.export.archive import PackageError
from meshrec.export.manifest import CheckedPackage, check_package
from meshrec.export.package import compile_anew, export
from meshrec.export.predictor import Predictor
from meshrec.export.signing import read_private_key, sign_package
from meshrec.ops.library import library_path

__all__ = [
    "CheckedPackage",
    "PackageError",
    "Predictor",
    "check_package",
    "compile_anew",
    "export",
    "library_path",
    "read_private_key",
    "sign_package",
]
