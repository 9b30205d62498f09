"""Runs programs written for TorchRec on MeshRec: ``import meshrec.compat.torchrec`` is the one added line.

After it ``import torchrec...`` and ``from fbgemm_gpu.split_embedding_configs import EmbOptimType`` give
MeshRec, where those packages are not installed. Where they are, they are used as ever, unless the bridge is
forced: by ``install(force=True)``, by ``MESHREC_COMPAT_FORCE=1`` in the environment, or on the command
line, which needs no added line at all::

    python -m meshrec.compat.torchrec [--force] script.py ARGUMENTS
    torchrun --nproc-per-node 2 -m meshrec.compat.torchrec [--force] script.py ARGUMENTS

What has no counterpart raises an ImportError that names the nearest thing. ``docs/from-torchrec.md`` lists
all names, and what differs.
"""

from meshrec.compat.bridge.finder import bridged_packages, install, uninstall

__all__ = ["bridged_packages", "install", "uninstall"]

install()
