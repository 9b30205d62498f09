"""Sharding plans: data types, builders for plans written by hand, and validation."""
