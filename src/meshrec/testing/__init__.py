"""Test utilities: compare sharded with unsharded models, and run functions on real ranks in a pool."""

from meshrec.testing.equality import assert_equal_to_unsharded
from meshrec.testing.rank_pool import RankError, RankPool

__all__ = ["RankError", "RankPool", "assert_equal_to_unsharded"]
