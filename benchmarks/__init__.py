"""Benchmarks beside the peers, in one process: each first verifies its results, then times."""
