"""Pipelined training: stages of a model."""

from meshrec.pipeline.stages import Staged

__all__ = ["Staged"]
