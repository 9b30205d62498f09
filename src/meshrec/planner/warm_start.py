"""What is left of a solved program for one that is like it, but has other classes and fewer candidates.

The simplex method needs few steps from a basis that is nearly right. So variables and rows have keys that say
the same in all programs of a way, and a basis goes from one program to the next by them.
"""

from typing import NamedTuple

import numpy as np

from meshrec.planner.highs import AT_LOWER, BASIC, Basis
from meshrec.planner.types import Ints

FIRST_ROW = 16
"""Kinds of rows; below are those of variables."""
_KIND, _FIRST = 48, 24
"""Bits below."""


class ClassCut(NamedTuple):
    """What a row of `ClassProgram.cuts` is made of."""

    name: int
    """Of the class."""
    phase: int
    factor: float


class WarmStart(NamedTuple):
    """The basis of a program by keys, in order, and the cuts in force."""

    key_N: Ints
    at_N: Basis
    cuts: list[ClassCut]

    @staticmethod
    def of(key_N: Ints, at_N: Basis, cuts: list[ClassCut]) -> "WarmStart":
        """From keys in any order."""
        order = np.argsort(key_N)
        return WarmStart(key_N[order], at_N[order], cuts)

    def basis(self, key_N: Ints) -> Basis:
        """That of a program with these variables and rows; what is new stays out of the way."""
        place = np.minimum(np.searchsorted(self.key_N, key_N), len(self.key_N) - 1)
        new = np.where(key_N >> _KIND >= FIRST_ROW, BASIC, AT_LOWER)
        return np.where(self.key_N[place] == key_N, self.at_N[place], new)


def key(kind: int, first: Ints | int, second: Ints | int = 0) -> Ints:
    """Keys of a kind by two numbers below 2^24."""
    return np.ravel((kind << _KIND) + (np.asarray(first, np.int64) << _FIRST) + second)
