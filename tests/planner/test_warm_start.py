import numpy as np

from meshrec.planner.highs import AT_LOWER, AT_UPPER, BASIC
from meshrec.planner.warm_start import FIRST_ROW, ClassCut, WarmStart, key


def test_a_basis_goes_by_keys():
    known = np.concatenate((key(0, np.array([7, 3])), key(FIRST_ROW, 1), key(FIRST_ROW, 2)))
    start = WarmStart.of(known, np.array([BASIC, AT_UPPER, AT_LOWER, BASIC]), [ClassCut(5, 0, 2.0)])
    wanted = np.concatenate(
        (key(0, np.array([3, 5, 7])), key(FIRST_ROW, 2), key(FIRST_ROW, 1), key(FIRST_ROW + 9, 1))
    )
    expected = [AT_UPPER, AT_LOWER, BASIC, BASIC, AT_LOWER, BASIC]
    np.testing.assert_array_equal(start.basis(wanted), expected)


def test_keys_are_apart():
    keys = [key(kind, np.arange(5)[:, None], np.arange(4)) for kind in range(3)]
    assert len(np.unique(np.concatenate(keys))) == 3 * 5 * 4
