"""The bridge that runs programs written for TorchRec on MeshRec; add the line ``import
meshrec.compat.torchrec``.

After this line, ``import torchrec...`` and ``from fbgemm_gpu.split_embedding_configs import EmbOptimType``
import MeshRec, if those packages are not installed. If they are installed, they are used as before, unless
the bridge is forced: by ``install(force=True)``, by ``MESHREC_COMPAT_FORCE=1`` in the environment, or on the
command line, which needs no added line::

    python -m meshrec.compat.torchrec [--force] script.py ARGUMENTS
    torchrun --nproc-per-node 2 -m meshrec.compat.torchrec [--force] script.py ARGUMENTS

A name without a counterpart raises an ImportError that names the nearest thing. ``docs/from-torchrec.md``
lists all names and all differences.
"""

from meshrec.compat.bridge.finder import bridged_packages, install, uninstall

__all__ = ["bridged_packages", "install", "uninstall"]

install()
