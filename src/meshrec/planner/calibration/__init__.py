"""Measure a machine, and fit the hardware profile with which the cost model predicts its step times best."""
