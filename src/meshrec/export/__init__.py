"""Packages: exported models that C++ or Python programs serve without the training code."""

from typing import TYPE_CHECKING

from meshrec.export.archive import PackageError
from meshrec.export.manifest import CheckedPackage, check_package
from meshrec.export.predictor import Predictor
from meshrec.export.signing import read_private_key, sign_package
from meshrec.lazy import import_on_use
from meshrec.ops.library import library_path

if TYPE_CHECKING:
    from meshrec.export.package import compile_anew, export

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

# Lazy, because a server only reads packages.
import_on_use(__name__)
