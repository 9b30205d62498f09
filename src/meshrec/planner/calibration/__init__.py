"""Measure a machine, and fit the planner's cost model."""
