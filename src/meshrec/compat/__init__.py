"""Bridges that run programs written for other libraries on MeshRec."""
