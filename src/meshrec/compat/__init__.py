"""Bridges for other libraries' programs on MeshRec."""
