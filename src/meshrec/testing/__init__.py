"""What users and our own tests call to check that a sharded model equals the unsharded one."""

from meshrec.testing.equality import assert_equal_to_unsharded
from meshrec.testing.rank_pool import RankError, RankPool
from meshrec.testing.slow_network import set_network

__all__ = ["RankError", "RankPool", "assert_equal_to_unsharded", "set_network"]
