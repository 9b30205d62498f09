"""Measures a machine and fits the planner's cost model to it."""
