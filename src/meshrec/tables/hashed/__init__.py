"""Tables for any int64 ID: a hash index, admission and eviction, and rows in memory that grows."""
