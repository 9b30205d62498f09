"""Checks and measurements for a machine with a GPU: `make gpu`."""
