"""Test utilities: equality of sharded and unsharded models, and pools of real ranks."""

from meshrec.testing.equality import assert_equal_to_unsharded
from meshrec.testing.rank_pool import RankError, RankPool

__all__ = ["RankError", "RankPool", "assert_equal_to_unsharded"]
