"""Bridges with which programs for other libraries, such as TorchRec, run on MeshRec."""
