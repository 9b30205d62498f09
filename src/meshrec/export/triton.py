"""Write packages to a model repository, from which NVIDIA Triton serves them with its Python backend."""

import shutil
from pathlib import Path
from typing import Any

from meshrec.durable import durable_folder
from meshrec.export.manifest import read_manifest
from meshrec.export.package import link

PACKAGE = "package"
"""Name of the package folder in the model version folder."""
_MODEL = """# Answers with the package beside it.
from meshrec.export.triton_backend import TritonPythonModel
"""


def write_triton(package: str | Path, repository: str | Path, *, name: str) -> Path:
    """Add a package to a Triton model repository, as ``NAME/config.pbtxt`` and ``NAME/1``.

    Package files are hard-linked if they are on the same file system, otherwise copied. MeshRec must
    be installed in the server's Python.

    Args:
        package: folder written by `export`.
        repository: model repository folder, created if it does not exist.
        name: model name.

    Returns:
        The model folder.

    Raises:
        ValueError: the repository already has a model with this name.
        PackageError: the folder is not a package.
    """
    package, folder = Path(package), Path(repository) / name
    manifest = read_manifest(package)
    if folder.exists():
        raise ValueError(f"{folder} exists already. Name another repository, or remove it.")
    with durable_folder(folder) as parts:
        # Triton expects a folder per version of a model.
        (parts / "1").mkdir()
        (parts / "1" / "model.py").write_text(_MODEL)
        shutil.copytree(
            package,
            parts / "1" / PACKAGE,
            copy_function=lambda source, target: link(Path(source), Path(target)),
        )
        (parts / "config.pbtxt").write_text(_config_text(name, manifest))
    return folder


def _config_text(name: str, manifest: dict[str, Any]) -> str:
    """Return the text of ``config.pbtxt`` for the Triton Inference Server.

    Inputs are the dense values, if the model has any, and the IDs and lengths of every feature. The output is
    the model's scores or vectors. Batch and value counts may have any size.
    """
    inputs = [("dense", "FP32", [-1, manifest["num_dense"]])] if manifest["num_dense"] else []
    for feature in manifest["features"]:
        inputs += [(f"{feature}.values", "INT64", [-1]), (f"{feature}.lengths", "INT32", [-1])]
    # -1 is a dimension of any size.
    outputs = [(manifest["outputs"], "FP32", [-1] if manifest["outputs"] == "scores" else [-1, -1])]
    lines = [
        f'name: "{_escape(name)}"',
        'backend: "python"',
        "# ids of all samples are concatenated: no dimension is the batch",
    ]
    lines.append("max_batch_size: 0")
    for kind_of_tensor, tensors in (("input", inputs), ("output", outputs)):
        for tensor, kind, dims in tensors:
            lines += [
                f"{kind_of_tensor} [",
                "  {",
                f'    name: "{_escape(tensor)}"',
                f"    data_type: TYPE_{kind}",
                f"    dims: [ {', '.join(map(str, dims))} ]",
                "  }",
                "]",
            ]
    lines += ["instance_group [", "  {", "    kind: KIND_CPU", "    count: 1", "  }", "]"]
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
