"""A model repository with which the Python backend of NVIDIA's Triton server answers from a package."""

import shutil
from pathlib import Path
from typing import Any

from meshrec.durable import durable_folder
from meshrec.export.manifest import read_manifest
from meshrec.export.package import link

PACKAGE = "package"
"""Name of the package's folder in the folder of the model's version."""
_MODEL = """# Answers with the package beside it.
from meshrec.export.triton_backend import TritonPythonModel
"""


def write_triton(package: str | Path, repository: str | Path, *, name: str) -> Path:
    """Write ``NAME/config.pbtxt``, ``NAME/1/model.py`` and ``NAME/1/package`` into a model repository.

    The package is linked if it is on the same file system, and copied otherwise. The server's Python must
    have MeshRec.

    Args:
        package: what `export` wrote.
        repository: the folder of all models; it may exist already.
        name: the name of the model.

    Returns: the model's folder.

    Raises:
        ValueError: the repository has a model of that name.
        PackageError: the folder is not a package.
    """
    package, folder = Path(package), Path(repository) / name
    manifest = read_manifest(package)
    if folder.exists():
        raise ValueError(f"{folder} exists already. Name another repository, or remove it.")
    with durable_folder(folder) as parts:
        (parts / "1").mkdir()
        (parts / "1" / "model.py").write_text(_MODEL)
        shutil.copytree(
            package,
            parts / "1" / PACKAGE,
            copy_function=lambda source, target: link(Path(source), Path(target)),
        )
        (parts / "config.pbtxt").write_text(_config(name, manifest))
    return folder


def _config(name: str, manifest: dict[str, Any]) -> str:
    inputs = [("dense", "FP32", [-1, manifest["num_dense"]])] if manifest["num_dense"] else []
    for feature in manifest["features"]:
        inputs += [(f"{feature}.values", "INT64", [-1]), (f"{feature}.lengths", "INT32", [-1])]
    outputs = [(manifest["outputs"], "FP32", [-1] if manifest["outputs"] == "scores" else [-1, -1])]
    lines = [
        f'name: "{_quoted(name)}"',
        'backend: "python"',
        "# ids of all samples lie end to end: no dim is B",
    ]
    lines.append("max_batch_size: 0")
    for what, tensors in (("input", inputs), ("output", outputs)):
        for tensor, kind, dims in tensors:
            lines += [
                f"{what} [",
                "  {",
                f'    name: "{_quoted(tensor)}"',
                f"    data_type: TYPE_{kind}",
                f"    dims: [ {', '.join(map(str, dims))} ]",
                "  }",
                "]",
            ]
    lines += ["instance_group [", "  {", "    kind: KIND_CPU", "    count: 1", "  }", "]"]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
