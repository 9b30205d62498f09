"""Slots of IDs that nobody can number: a hash index, a mix of IDs, and the distinct IDs of a batch."""

from meshrec.ops.index.hash_index import HashIndex
from meshrec.ops.index.naive import mix, unique, unmix

__all__ = ["HashIndex", "mix", "unique", "unmix"]
