"""Sharding plans as data: table shards per rank, builders for them, and their validation."""
