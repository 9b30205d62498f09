"""Bridge for TorchRec programs on MeshRec. Add the line ``import meshrec.compat.torchrec``.

After this line, ``import torchrec...`` and ``from fbgemm_gpu.split_embedding_configs import EmbOptimType``
import MeshRec, unless those packages are installed. Installed packages are replaced only if forced: with
``install(force=True)``, with ``MESHREC_COMPAT_FORCE=1`` in the environment, or on the command line, which
does not need the added line::

    python -m meshrec.compat.torchrec [--force] script.py ARGUMENTS
    torchrun --nproc-per-node 2 -m meshrec.compat.torchrec [--force] script.py ARGUMENTS

A name without a counterpart raises an ImportError with the nearest alternative. ``docs/from-torchrec.md``
lists all names and differences.
"""

from meshrec.compat.bridge.finder import bridged_packages, install, uninstall

__all__ = ["bridged_packages", "install", "uninstall"]

# Importing this package is the documented switch, so it must take effect at import.
install()
