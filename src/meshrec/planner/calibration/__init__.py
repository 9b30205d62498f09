"""Measure a machine, and fit the hardware profile with which the cost model best predicts step times."""
