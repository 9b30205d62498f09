"""Checks of hosts before training: each names what it found, and what to do about it."""

from meshrec.health.examine import Examination, Wanted, examine
from meshrec.health.findings import Finding

__all__ = ["Examination", "Finding", "Wanted", "examine"]
