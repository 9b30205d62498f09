"""Tools for tests: equality of sharded and unsharded models, pools of real ranks, and a simulated network."""

from meshrec.testing.equality import assert_equal_to_unsharded
from meshrec.testing.rank_pool import RankError, RankPool
from meshrec.testing.slow_network import set_network

__all__ = ["RankError", "RankPool", "assert_equal_to_unsharded", "set_network"]
